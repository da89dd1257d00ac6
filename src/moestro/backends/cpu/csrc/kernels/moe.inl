// Running experts.

// Which (token, choice) pairs each expert serves, in order: pairs[offsets[e] .. offsets[e + 1]).
// place[pair] is where the pair stands in that list; its activation lies in the same row.
struct ExpertLists {
    int64_t* offsets;  // [E + 1]
    int32_t* pairs;    // [T K]
    int32_t* place;    // [T K]
    int32_t* active;   // experts that serve any pair, ascending
    int64_t num_active;

    int64_t rows(int64_t e) const { return offsets[e + 1] - offsets[e]; }
};

inline void fill_lists(const MoeArgs& a, ExpertLists& lists) {
    const int64_t pairs = a.num_tokens * a.top_k;
    for (int64_t e = 0; e <= a.num_experts; ++e) lists.offsets[e] = 0;
    for (int64_t p = 0; p < pairs; ++p) ++lists.offsets[a.topk_ids[p] + 1];
    for (int64_t e = 0; e < a.num_experts; ++e) lists.offsets[e + 1] += lists.offsets[e];
    for (int64_t p = 0; p < pairs; ++p) {
        const int64_t at = lists.offsets[a.topk_ids[p]]++;
        lists.pairs[at] = static_cast<int32_t>(p);
        lists.place[p] = static_cast<int32_t>(at);
    }
    for (int64_t e = a.num_experts; e > 0; --e) lists.offsets[e] = lists.offsets[e - 1];
    lists.offsets[0] = 0;
    lists.num_active = 0;
    for (int64_t e = 0; e < a.num_experts; ++e)
        if (lists.offsets[e + 1] > lists.offsets[e])
            lists.active[lists.num_active++] = static_cast<int32_t>(e);
}

constexpr int64_t kRowBlock = 96;                 // rows an expert task takes at once
constexpr int64_t kActBlock = 32;                 // gate rows (and as many up rows) a task takes
constexpr int64_t kPartBytes = int64_t{4} << 20;  // what one worker keeps of unsummed outputs

template <class Dot>
struct Experts {
    using TX = typename Dot::TX;
    using TW = typename Dot::TW;
    const MoeArgs& a;
    ExpertLists lists;
    TX* act;         // [T K, I], in list order
    TX* shared_act;  // [T, J]
    // The same rows as the micro-kernel wants them, where it does: x in list order, x, and both
    // activations. A row that is alone among its expert's is used where it lies.
    TX *packed_x, *packed_shared_x, *packed_act, *packed_shared_act;
    float* parts;  // per worker [T K or T, block]
    int64_t part_floats;
    int64_t out_block;
    int64_t act_span;  // kActBlocks that one activation task takes

    // act[rows, i0 : i0 + m] = silu(gate) * up for n rows of x. next: as for Gemm::block.
    void activate(const TX* const* rows, const TX* packed, int64_t n, const TW* gate_up,
                  int64_t inner, int64_t i0, int64_t m, TX* out, const TW* next) const {
        alignas(64) float gate[kRowBlock * kActBlock], up[kRowBlock * kActBlock];
        const int64_t N = a.hidden;
        const TW *gate_rows = gate_up + i0 * N, *up_rows = gate_up + (inner + i0) * N;
        Gemm<Dot>::block(rows, packed, n, gate_rows, N, m, N, gate, kActBlock, up_rows);
        Gemm<Dot>::block(rows, packed, n, up_rows, N, m, N, up, kActBlock, next);
        for (int64_t r = 0; r < n; ++r)
            for_vectors(m, [&](int64_t i, int64_t lanes) {
                const F g = load_some(gate + r * kActBlock + i, lanes);
                const F u = load_some(up + r * kActBlock + i, lanes);
                store_some(out + r * inner + i0 + i, silu(g) * u, lanes);
            });
    }

    const TX* input(int64_t token) const { return static_cast<const TX*>(a.x) + token * a.hidden; }

    // Rows of x for entries [at, at + n) of the lists.
    void list_rows(int64_t at, int64_t n, const TX** rows) const {
        for (int64_t r = 0; r < n; ++r) rows[r] = input(lists.pairs[at + r] / a.top_k);
    }

    // Runs fn(i0, m, next gate rows) for the blocks of act_span kActBlocks from block `first` on.
    template <class Fn>
    void for_act_blocks(int64_t first, int64_t inner, const TW* gate_up, Fn&& fn) const {
        const int64_t end = smaller(inner, (first + act_span) * kActBlock);
        for (int64_t i0 = first * kActBlock; i0 < end; i0 += kActBlock) {
            const int64_t m = smaller(kActBlock, end - i0);
            fn(i0, m, i0 + m < end ? gate_up + (i0 + m) * a.hidden : nullptr);
        }
    }

    int64_t act_tasks(int64_t inner) const { return blocks(blocks(inner, kActBlock), act_span); }

    void activate_routed(int64_t task) const {
        const int64_t I = a.intermediate, per_expert = act_tasks(I);
        const int64_t e = lists.active[task / per_expert];
        const int64_t begin = lists.offsets[e], end = lists.offsets[e + 1];
        const TW* gate_up = static_cast<const TW*>(a.gate_up) + e * 2 * I * a.hidden;
        for_act_blocks(
            task % per_expert * act_span, I, gate_up, [&](int64_t i0, int64_t m, const TW* next) {
                for (int64_t at = begin; at < end; at += kRowBlock) {
                    const int64_t n = smaller(kRowBlock, end - at);
                    const TX* rows[kRowBlock];
                    list_rows(at, n, rows);
                    activate(rows, packed_or(rows[0], packed_x, at, end - begin, a.hidden), n,
                             gate_up, I, i0, m, act + at * I, next);
                }
            });
    }

    void activate_shared(int64_t task) const {
        const int64_t J = a.shared_intermediate, per_row_block = act_tasks(J);
        const int64_t t0 = task / per_row_block * kRowBlock;
        const int64_t n = smaller(kRowBlock, a.num_tokens - t0);
        const TW* gate_up = static_cast<const TW*>(a.shared_gate_up);
        const TX* rows[kRowBlock];
        for (int64_t r = 0; r < n; ++r) rows[r] = input(t0 + r);
        const TX* packed = packed_or(rows[0], packed_shared_x, t0, a.num_tokens, a.hidden);
        for_act_blocks(task % per_row_block * act_span, J, gate_up,
                       [&](int64_t i0, int64_t m, const TW* next) {
                           activate(rows, packed, n, gate_up, J, i0, m, shared_act + t0 * J, next);
                       });
    }

    // Where row `at` of a packed buffer lies; `plain` for a group of `rows` that needs no packing.
    static const TX* packed_or(const TX* plain, const TX* packed, int64_t at, int64_t rows,
                               int64_t K) {
        return Gemm<Dot>::packs(rows, K) ? packed + Gemm<Dot>::packed_elements(at, K) : plain;
    }

    // Packs a block of one expert's rows, of x or (`activations`) of act; task counts blocks.
    void pack_routed(int64_t block_start, int64_t block_rows, bool activations) const {
        const int64_t K = activations ? a.intermediate : a.hidden;
        const TX* rows[kRowBlock];
        if (activations)
            for (int64_t r = 0; r < block_rows; ++r) rows[r] = act + (block_start + r) * K;
        else
            list_rows(block_start, block_rows, rows);
        TX* to = activations ? packed_act : packed_x;
        Gemm<Dot>::pack(rows, block_rows, K, to + Gemm<Dot>::packed_elements(block_start, K));
    }

    void pack_shared(int64_t t0, bool activations) const {
        const int64_t K = activations ? a.shared_intermediate : a.hidden;
        const int64_t n = smaller(kRowBlock, a.num_tokens - t0);
        const TX* from = activations ? shared_act : static_cast<const TX*>(a.x);
        const TX* rows[kRowBlock];
        for (int64_t r = 0; r < n; ++r) rows[r] = from + (t0 + r) * K;
        TX* to = activations ? packed_shared_act : packed_shared_x;
        Gemm<Dot>::pack(rows, n, K, to + Gemm<Dot>::packed_elements(t0, K));
    }

    // Packs all rows of x, or all activations, that need it.
    void pack(bool activations) const {
        const int64_t K = activations ? a.intermediate : a.hidden;
        const int64_t shared_K = activations ? a.shared_intermediate : a.hidden;
        const bool shared = a.shared_down != nullptr && Gemm<Dot>::packs(a.num_tokens, shared_K);
        bool routed = false;
        for (int64_t i = 0; i < lists.num_active && !routed; ++i)
            routed = Gemm<Dot>::packs(lists.rows(lists.active[i]), K);
        const int64_t shared_tasks = shared ? blocks(a.num_tokens, kRowBlock) : 0;
        parallel(shared_tasks + (routed ? lists.num_active : 0), [&](int64_t task, int) {
            if (task < shared_tasks) return pack_shared(task * kRowBlock, activations);
            const int64_t e = lists.active[task - shared_tasks];
            if (!Gemm<Dot>::packs(lists.rows(e), K)) return;
            for (int64_t at = lists.offsets[e]; at < lists.offsets[e + 1]; at += kRowBlock)
                pack_routed(at, smaller(kRowBlock, lists.offsets[e + 1] - at), activations);
        });
    }

    // c[rows of in, m] = in . down[n0 : n0 + m]
    void project(const TX* in, const TX* packed, int64_t n, int64_t inner, const TW* down,
                 int64_t m, float* c, const TW* next) const {
        for (int64_t r0 = 0; r0 < n; r0 += kRowBlock) {
            const int64_t count = smaller(kRowBlock, n - r0);
            const TX* rows[kRowBlock];
            for (int64_t r = 0; r < count; ++r) rows[r] = in + (r0 + r) * inner;
            Gemm<Dot>::block(rows, packed_or(rows[0], packed, r0, n, inner), count, down, inner, m,
                             inner, c + r0 * out_block, out_block, next);
        }
    }

    // Rows n0... of the i-th active expert's down projection; null past the last.
    const TW* down_rows(int64_t i, int64_t n0) const {
        if (i >= lists.num_active) return nullptr;
        return static_cast<const TW*>(a.down) + (lists.active[i] * a.hidden + n0) * a.intermediate;
    }

    // All down projections of columns [n0, n0 + m), then each token's sum in order of choice.
    void combine(int64_t task, int worker) const {
        const int64_t n0 = task * out_block, m = smaller(out_block, a.hidden - n0);
        float* routed = parts + worker * part_floats;
        float* shared = routed + a.num_tokens * a.top_k * out_block;
        const int64_t I = a.intermediate, J = a.shared_intermediate;
        const TW* shared_down = static_cast<const TW*>(a.shared_down);
        if (shared_down != nullptr)
            project(shared_act, packed_shared_act, a.num_tokens, J, shared_down + n0 * J, m, shared,
                    down_rows(0, n0));
        for (int64_t i = 0; i < lists.num_active; ++i) {
            const int64_t e = lists.active[i], at = lists.offsets[e];
            project(act + at * I, packed_act + Gemm<Dot>::packed_elements(at, I), lists.rows(e), I,
                    down_rows(i, n0), m, routed + at * out_block, down_rows(i + 1, n0));
        }
        for (int64_t token = 0; token < a.num_tokens; ++token)
            sum_token(token, n0, m, routed, a.shared_down == nullptr ? nullptr : shared);
    }

    void sum_token(int64_t token, int64_t n0, int64_t m, const float* routed,
                   const float* shared) const {
        const int32_t* place = lists.place + token * a.top_k;
        const float* weights = a.topk_weights + token * a.top_k;
        TX* out = static_cast<TX*>(a.out) + token * a.hidden + n0;
        for_vectors(m, [&](int64_t i, int64_t lanes) {
            F sum = zero();
            for (int64_t k = 0; k < a.top_k; ++k)
                sum =
                    fma(load_some(routed + place[k] * out_block + i, lanes), set1(weights[k]), sum);
            if (shared != nullptr) {
                F extra = load_some(shared + token * out_block + i, lanes);
                if (!a.fp32_combine) {
                    sum = rounded(sum);
                    extra = rounded(extra);
                }
                sum = sum + extra;
            }
            store_some(out + i, sum, lanes);
        });
    }

    static F rounded(F x) {
        TX there[W];
        store(there, x);
        return load(there);
    }
};

// Long tasks read memory in long runs, but every worker should get several.
inline int64_t act_span_of(const MoeArgs& a, int64_t num_active, int workers) {
    const int64_t all = num_active * blocks(a.intermediate, kActBlock);
    const int64_t span = all / (8 * workers);
    return span < 1 ? 1 : span;
}

template <class Dot>
Status moe_experts_of(const MoeArgs& a) {
    using TX = typename Dot::TX;
    const int64_t pairs = a.num_tokens * a.top_k, size = sizeof(TX);
    const int64_t shared_rows = a.shared_down == nullptr ? 0 : a.num_tokens;
    const int64_t rows = pairs + shared_rows;
    const int workers = num_workers();
    int64_t out_block = kWeightBlock;
    while (out_block > 16 && rows * out_block * 4 > kPartBytes) out_block /= 2;
    const int64_t part = lines(rows * out_block * 4);
    const auto packed = [&](int64_t count, int64_t K) {
        return lines(Gemm<Dot>::packed_elements(count, K) * size);
    };
    const int64_t I = a.intermediate, J = a.shared_intermediate, N = a.hidden;
    const int64_t bytes[] = {lines((a.num_experts + 1) * 8),
                             lines(pairs * 4),
                             lines(pairs * 4),
                             lines(a.num_experts * 4),
                             lines(pairs * I * size),
                             lines(shared_rows * J * size),
                             packed(pairs, N),
                             packed(shared_rows, N),
                             packed(pairs, I),
                             packed(shared_rows, J),
                             part * workers};
    constexpr int kParts = sizeof bytes / sizeof bytes[0];
    int64_t total = 0;
    for (int64_t b : bytes) total += b;
    char* at[kParts];
    at[0] = static_cast<char*>(call_scratch(static_cast<size_t>(total)));
    if (at[0] == nullptr) return kNoMemory;
    for (int i = 1; i < kParts; ++i) at[i] = at[i - 1] + bytes[i - 1];
    ExpertLists lists{reinterpret_cast<int64_t*>(at[0]), reinterpret_cast<int32_t*>(at[1]),
                      reinterpret_cast<int32_t*>(at[2]), reinterpret_cast<int32_t*>(at[3]), 0};
    fill_lists(a, lists);
    TX* buffers[6];
    for (int i = 0; i < 6; ++i) buffers[i] = reinterpret_cast<TX*>(at[4 + i]);
    const Experts<Dot> run{a,          lists,      buffers[0],
                           buffers[1], buffers[2], buffers[3],
                           buffers[4], buffers[5], reinterpret_cast<float*>(at[10]),
                           part / 4,   out_block,  act_span_of(a, lists.num_active, workers)};
    const int64_t shared_tasks =
        blocks(shared_rows, kRowBlock) * run.act_tasks(a.shared_intermediate);
    const int64_t routed_tasks = lists.num_active * run.act_tasks(a.intermediate);
    run.pack(false);
    parallel(shared_tasks + routed_tasks, [&](int64_t task, int) {
        if (task < shared_tasks)
            run.activate_shared(task);
        else
            run.activate_routed(task - shared_tasks);
    });
    run.pack(true);
    parallel(
        blocks(a.hidden, out_block), [&](int64_t task, int worker) { run.combine(task, worker); },
        workers);
    return kOk;
}

Status moe_experts(const MoeArgs& a) {
    Status status = kOk;
    with_dot(a.x_dtype, a.weight_dtype,
             [&](auto* dot) { status = moe_experts_of<pointee<decltype(dot)>>(a); });
    return status;
}
