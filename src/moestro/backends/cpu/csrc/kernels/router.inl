// The router: x [T, N] times the experts' rows, and the choice of experts from the logits.
//
// Weights lie in panels of 32 experts (backends/cpu/routing.py: pack_router): for each pair of k
// (each k, with fp32 weights) all 32 experts of W_high, then all of W_low, so that one expert is
// one lane and no sum runs across lanes. A logit is summed over blocks of kRouterK along K, each
// from zero, in order; in a block every term has one accumulator from low to high k:
//     logit = sum over blocks of (x . W_high) + (x . W_low) / 256.
// That is the same for any number of tokens and any cut into tasks.
//
// bf16 x bf16 at AVX-512 is vdpbf16ps, which takes subnormal operands as zero and flushes subnormal
// results: a logit may be off by at most 2^-126 a product.

constexpr int64_t kPanel = 32;
constexpr int64_t kRouterK = 512;
constexpr int64_t kRouterRows = 96;  // tokens a task takes at most
constexpr float kLowScale = 1.0f / 256;

#if defined(MOESTRO_LEVEL_AVX512) || defined(MOESTRO_LEVEL_AMX)
constexpr int kTileRows = 6, kTileVectors = 2;
#else
constexpr int kTileRows = 2, kTileVectors = 2;
#endif

// bf16 weights, TERMS a number, in pairs of k.
template <int TERMS>
struct PairWeights {
    static constexpr int kTerms = TERMS;
    static constexpr int64_t kStep = 2;                        // k a step
    static constexpr int64_t kStepBytes = TERMS * kPanel * 4;  // of one panel
#if defined(MOESTRO_LEVEL_AVX512) || defined(MOESTRO_LEVEL_AMX)
    using X = bf16;
    using XPair = __m512i;
    using Weight = __m512i;
    static XPair broadcast(const bf16* x) {
        int32_t pair;
        std::memcpy(&pair, x, 4);
        return _mm512_set1_epi32(pair);
    }
    static Weight weight(const char* p) { return _mm512_loadu_si512(p); }
    static F mac(F acc, XPair x, Weight w) {
        return {_mm512_dpbf16_ps(acc.v, (__m512bh)x, (__m512bh)w)};
    }
#else
    using X = float;
    using XPair = EvenOdd;
    using Weight = EvenOdd;
    static XPair broadcast(const float* x) { return {set1(x[0]), set1(x[1])}; }
    static Weight weight(const char* p) { return load_even_odd(reinterpret_cast<const bf16*>(p)); }
    static F mac(F acc, const XPair& x, const Weight& w) {
        return fma(x.odd, w.odd, fma(x.even, w.even, acc));
    }
#endif
};

struct Fp32Weights {
    static constexpr int kTerms = 1;
    static constexpr int64_t kStep = 1;
    static constexpr int64_t kStepBytes = kPanel * 4;
    using X = float;
    using XPair = F;
    using Weight = F;
    static XPair broadcast(const float* x) { return set1(*x); }
    static Weight weight(const char* p) { return load(reinterpret_cast<const float*>(p)); }
    static F mac(F acc, F x, F w) { return fma(x, w, acc); }
};

// y[r][0 .. 32) (+)= x[r] . panel over `steps` steps. first: y is written, not added to.
template <class Weights, int ROWS>
inline void panel_tile(const typename Weights::X* x, int64_t x_stride, const char* panel,
                       int64_t steps, float* y, int64_t y_stride, bool first) {
    constexpr int V = kTileVectors, T = Weights::kTerms;
    for (int64_t lane = 0; lane < kPanel; lane += V * W) {
        F acc[T][ROWS][V];
        for (int t = 0; t < T; ++t)
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < V; ++v) acc[t][r][v] = zero();
        const char* p = panel + lane * (Weights::kStepBytes / T / kPanel);
        for (int64_t s = 0; s < steps; ++s, p += Weights::kStepBytes) {
#pragma GCC unroll 4
            for (int64_t line = 0; line < Weights::kStepBytes; line += 64)
                __builtin_prefetch(p + 2048 + line);
            typename Weights::XPair pair[ROWS];
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r)
                pair[r] = Weights::broadcast(x + r * x_stride + s * Weights::kStep);
#pragma GCC unroll 2
            for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) {
                    const auto w = Weights::weight(p + t * kPanel * 4 + v * W * 4);
#pragma GCC unroll 8
                    for (int r = 0; r < ROWS; ++r)
                        acc[t][r][v] = Weights::mac(acc[t][r][v], pair[r], w);
                }
        }
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < V; ++v) {
                float* at = y + r * y_stride + lane + v * W;
                F sum = acc[0][r][v];
                if (T == 2) sum = fma(acc[T - 1][r][v], set1(kLowScale), sum);
                store(at, first ? sum : load(at) + sum);
            }
    }
}

// The logits of one task's tokens and panels.
template <class T, class Weights>
struct RouterTile {
    using X = typename Weights::X;
    const RouterArgs& a;

    // Rows of x over k in [k0, k0 + n) as the weights want them; an odd n is filled up with a zero.
    // Where they are already, they stay where they lie.
    static const X* rows(const T* x, int64_t stride, int64_t count, int64_t n, X* buffer,
                         int64_t* buffer_stride) {
        const int64_t whole = blocks(n, Weights::kStep) * Weights::kStep;
        if constexpr (std::is_same_v<X, T>) {
            if (whole == n) {
                *buffer_stride = stride;
                return x;
            }
        }
        *buffer_stride = whole;
        for (int64_t r = 0; r < count; ++r) {
            X* to = buffer + r * whole;
            if (whole != n) to[n] = X{};
            if constexpr (std::is_same_v<X, T>)
                std::memcpy(to, x + r * stride, static_cast<size_t>(n) * sizeof(T));
            else
                for_vectors(n, [&](int64_t i, int64_t m) {
                    store_some(to + i, load_some(x + r * stride + i, m), m);
                });
        }
        return buffer;
    }

    // y: [count, panels * 32] for tokens [t0, t0 + count), row stride y_stride.
    void logits(int64_t t0, int64_t count, int64_t panel0, int64_t panels, float* y,
                int64_t y_stride) const {
        alignas(64) X buffer[kTileRows * kRouterK];
        const int64_t N = a.hidden;
        const int64_t panel_bytes = blocks(N, Weights::kStep) * Weights::kStepBytes;
        const char* weight = static_cast<const char*>(a.weight) + panel0 * panel_bytes;
        for (int64_t k0 = 0; k0 < N; k0 += kRouterK) {
            const int64_t n = smaller(kRouterK, N - k0);
            const int64_t steps = blocks(n, Weights::kStep);
            for (int64_t r0 = 0; r0 < count; r0 += kTileRows) {
                const int64_t tile = smaller(kTileRows, count - r0);
                int64_t stride;
                const X* x = rows(static_cast<const T*>(a.x) + (t0 + r0) * N + k0, N, tile, n,
                                  buffer, &stride);
                for (int64_t p = 0; p < panels; ++p)
                    some_rows(tile, x, stride,
                              weight + p * panel_bytes + k0 / Weights::kStep * Weights::kStepBytes,
                              steps, y + r0 * y_stride + p * kPanel, y_stride, k0 == 0);
            }
        }
    }

    template <int ROWS = kTileRows, class... Rest>
    static void some_rows(int64_t count, Rest... rest_and_x) {
        if constexpr (ROWS > 1)
            if (count < ROWS) return some_rows<ROWS - 1>(count, rest_and_x...);
        panel_tile<Weights, ROWS>(rest_and_x...);
    }
};

// Chooses the experts of tokens [t0, t0 + count) and counts them; logits: row stride `stride`.
inline void route_tokens(const RouterArgs& a, int64_t t0, int64_t count, const float* logits,
                         int64_t stride) {
    const GatingRule rule = rule_of(a);
    int32_t counts[kMaxExperts];
    std::memset(counts, 0, static_cast<size_t>(a.num_experts) * sizeof(int32_t));
    for (int64_t i = 0; i < count; ++i) {
        const float* row = logits + i * stride;
        if (a.logits != nullptr)
            std::memcpy(a.logits + (t0 + i) * a.num_experts, row,
                        static_cast<size_t>(a.num_experts) * sizeof(float));
        if (a.topk_ids == nullptr) continue;
        int32_t* ids = a.topk_ids + (t0 + i) * a.top_k;
        gate_token(rule, row, ids, a.topk_weights + (t0 + i) * a.top_k);
        for (int64_t k = 0; k < a.top_k; ++k) ++counts[ids[k]];
    }
    if (a.counts == nullptr || a.topk_ids == nullptr) return;
    for (int64_t e = 0; e < a.num_experts; ++e)
        if (counts[e]) __atomic_fetch_add(a.counts + e, counts[e], __ATOMIC_RELAXED);
}

// Many tokens: a task takes a block of them and all experts. Few: a task takes some panels too, and
// whoever finishes a block's last panel chooses its experts.
template <class T, class Weights>
Status route(const RouterArgs& a) {
    const int workers = num_workers();
    const int64_t panels = blocks(a.num_experts, kPanel), width = panels * kPanel;
    int64_t rows = blocks(blocks(a.num_tokens, 4 * workers), kTileRows) * kTileRows;
    rows = smaller(kRouterRows, rows < 48 ? 48 : rows);
    const int64_t num_blocks = blocks(a.num_tokens, rows);
    const int64_t splits = num_blocks >= 2 * workers || workers == 1
                               ? 1
                               : smaller(panels, blocks(4 * workers, num_blocks));
    const int64_t span = blocks(panels, splits), parts = blocks(panels, span);
    const int64_t buffers = parts == 1 ? workers : num_blocks;
    const size_t logits_bytes = static_cast<size_t>(lines(buffers * rows * width * 4));
    char* scratch =
        static_cast<char*>(call_scratch(logits_bytes + static_cast<size_t>(lines(num_blocks * 4))));
    if (scratch == nullptr) return kNoMemory;
    float* logits = reinterpret_cast<float*>(scratch);
    int32_t* done = reinterpret_cast<int32_t*>(scratch + logits_bytes);
    std::memset(done, 0, static_cast<size_t>(num_blocks) * sizeof(int32_t));
    const RouterTile<T, Weights> tile{a};
    parallel(
        num_blocks * parts,
        [&](int64_t task, int worker) {
            const int64_t block = task / parts, part = task % parts;
            const int64_t t0 = block * rows, count = smaller(rows, a.num_tokens - t0);
            const int64_t p0 = part * span, p1 = smaller(panels, p0 + span);
            float* y = logits + (parts == 1 ? worker : block) * rows * width;
            tile.logits(t0, count, p0, p1 - p0, y + p0 * kPanel, width);
            if (parts > 1 && __atomic_add_fetch(done + block, 1, __ATOMIC_ACQ_REL) !=
                                 static_cast<int32_t>(parts))
                return;
            route_tokens(a, t0, count, y, width);
        },
        workers);
    return kOk;
}

Status moe_router(const RouterArgs& a) {
    if (a.terms == 0) {
        Status status = kOk;
        with_dtype(a.x_dtype,
                   [&](auto* x) { status = route<pointee<decltype(x)>, Fp32Weights>(a); });
        return status;
    }
    return a.terms == 1 ? route<bf16, PairWeights<1>>(a) : route<bf16, PairWeights<2>>(a);
}
