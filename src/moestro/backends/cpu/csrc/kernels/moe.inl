// Running experts: gate and up with SiLU, then down, then each token's sum in order of choice.
//
// Every (token, choice) pair has a place in one list, experts ascending and in each the tokens in
// order; behind them come the shared expert's rows, one a token. A segment is up to kRowBlock
// places of one expert.

constexpr int64_t kChunkPairs = 16384;           // pairs that are computed at once
constexpr int64_t kAllParts = int64_t{8} << 20;  // bytes of unsummed outputs kept for a chunk
constexpr int64_t kTasksAWorker = 4;

struct Segment {
    int64_t at;  // its first place
    int32_t rows, expert;
    bool shared;
};

// Weights of the routed experts or of the shared one, and the rows that go through them.
struct ExpertPart {
    Weight gate_up, down;
    int64_t inner;       // I or J
    RowsOfX x;           // by token
    char* act;           // silu(gate) * up in x's dtype, by place, zeros up to act_stride
    int64_t act_stride;  // bytes
    char* down_rows;     // the same in the form that `down` wants; act itself where that does
    int64_t down_stride;

    ExpertPart(const PackedWeight& up, const PackedWeight& low, int32_t x_dtype)
        : gate_up(up, x_dtype),
          down(low, x_dtype),
          inner(low.in_features),
          x{nullptr, 0},
          act(nullptr),
          act_stride(RowForm::padded(inner) * (x_dtype == kF32 ? 4 : 2)),
          down_rows(nullptr),
          down_stride(down.form.takes(x_dtype, true) ? 0 : down.form.bytes()) {}
};

struct Experts {
    const MoeArgs& a;
    ExpertPart* parts[2];  // routed, and shared or null
    int workers;           // that there are buffers for
    int64_t t0, tokens;    // the chunk
    int64_t pairs, places;
    int32_t* token_of;  // [places], within the call
    int32_t* place_of;  // [pairs], by token and choice
    Segment* segments;
    int64_t num_segments;
    int64_t* first_item;     // [num_segments + 1]: gate-up panels before a segment's
    int32_t* panels_left;    // by segment: gate-up panels not done yet
    int32_t* segments_left;  // by panel of out: segments not done yet
    float* sums;             // [panels or workers][places][kOutStride]

    const ExpertPart& part(const Segment& s) const { return *parts[s.shared]; }
    int64_t out_panels() const { return parts[0]->down.layout.panels; }

    void list();
    void add_segments(int64_t begin, int64_t end, int32_t expert, bool shared);
    void activate(int64_t item) const;
    void prepare_down(const Segment& s) const;
    void project(const Segment& s, int64_t panel, float* into) const;
    void combine(int64_t panel, const float* from) const;
};

void Experts::add_segments(int64_t begin, int64_t end, int32_t expert, bool shared) {
    const int64_t rows = end > begin ? even_rows(end - begin) : 1;
    for (int64_t at = begin; at < end; at += rows) {
        Segment& s = segments[num_segments];
        s = {at, static_cast<int32_t>(smaller(rows, end - at)), expert, shared};
        const int64_t panels = part(s).gate_up.layout.panels;
        panels_left[num_segments] = static_cast<int32_t>(panels);
        first_item[num_segments + 1] = first_item[num_segments] + panels;
        ++num_segments;
    }
}

// Counts, then places: each expert's pairs in order.
void Experts::list() {
    const int64_t experts = a.gate_up.num_experts;
    const int32_t* ids = a.topk_ids + t0 * a.top_k;
    int64_t* ends = first_item;  // free until segments are made
    for (int64_t e = 0; e <= experts; ++e) ends[e] = 0;
    for (int64_t p = 0; p < pairs; ++p) ++ends[ids[p] + 1];
    for (int64_t e = 0; e < experts; ++e) ends[e + 1] += ends[e];
    for (int64_t p = 0; p < pairs; ++p) {
        const int64_t at = ends[ids[p]]++;
        token_of[at] = static_cast<int32_t>(t0 + p / a.top_k);
        place_of[p] = static_cast<int32_t>(at);
    }
    for (int64_t at = pairs; at < places; ++at)
        token_of[at] = static_cast<int32_t>(t0 + at - pairs);
    num_segments = 0;
    int64_t* items = first_item + experts + 1;
    first_item = items;
    items[0] = 0;
    if (places > pairs) add_segments(pairs, places, 0, true);
    for (int64_t e = 0, begin = 0; e < experts; begin = ends[e++])
        add_segments(begin, ends[e], static_cast<int32_t>(e), false);
}

// One panel of gate and up rows of one segment; after its last one, act as down wants it.
void Experts::activate(int64_t item) const {
    int64_t low = 0, high = num_segments;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (first_item[middle] <= item ? low : high) = middle;
    }
    const Segment& s = segments[low];
    const ExpertPart& e = part(s);
    const PackedLayout& l = e.gate_up.layout;
    const int64_t panel = item - first_item[low], half = l.width(panel) / 2;
    const void* rows[kRowBlock];
    for (int64_t r = 0; r < s.rows; ++r) rows[r] = e.x.row(token_of[s.at + r]);
    alignas(64) float c[kRowBlock * kOutStride];
    e.gate_up.times(s.expert, panel, rows, s.rows, c);
    const int64_t base = s.shared ? pairs : 0;
    with_dtype(a.x_dtype, [&](auto* type) {
        using TX = pointee<decltype(type)>;
        for (int64_t r = 0; r < s.rows; ++r) {
            TX* act = reinterpret_cast<TX*>(e.act + (s.at + r - base) * e.act_stride);
            for (int64_t v = 0; v < half; ++v) {
                const float *gate = c + r * kOutStride + v * kVectorRows,
                            *up = gate + half * kVectorRows;
                const int64_t first = l.first_row(panel, v);
                for_vectors(l.rows_of(panel, v), [&](int64_t i, int64_t n) {
                    store_some(act + first + i, silu(load(gate + i)) * load(up + i), n);
                });
            }
            if (panel == l.panels - 1 && RowForm::padded(e.inner) > e.inner)
                __builtin_memset(
                    act + e.inner, 0,
                    static_cast<size_t>(RowForm::padded(e.inner) - e.inner) * sizeof(TX));
        }
    });
    if (e.down_stride == 0) return;
    if (__atomic_sub_fetch(&panels_left[low], 1, __ATOMIC_ACQ_REL) == 0) prepare_down(s);
}

void Experts::prepare_down(const Segment& s) const {
    const ExpertPart& e = part(s);
    const int64_t base = s.shared ? pairs : 0;
    for (int64_t at = s.at - base; at < s.at - base + s.rows; ++at)
        prepare_row(e.down.form, a.x_dtype, e.act + at * e.act_stride,
                    e.down_rows + at * e.down_stride);
}

// into[place][kOutStride] = act . panel^T for a segment's places.
void Experts::project(const Segment& s, int64_t panel, float* into) const {
    const ExpertPart& e = part(s);
    const int64_t base = s.shared ? pairs : 0;
    const int64_t stride = e.down_stride == 0 ? e.act_stride : e.down_stride;
    const char* in = e.down_stride == 0 ? e.act : e.down_rows;
    const void* rows[kRowBlock];
    for (int64_t r = 0; r < s.rows; ++r) rows[r] = in + (s.at + r - base) * stride;
    e.down.times(s.expert, panel, rows, s.rows, into + s.at * kOutStride);
}

template <class T>
inline F rounded(F x) {
    T there[W];
    store(there, x);
    return load(there);
}

// One panel of out: each token's sum of its places, in order of choice, then the shared expert.
void Experts::combine(int64_t panel, const float* from) const {
    const PackedLayout& l = parts[0]->down.layout;
    const bool shared = places > pairs;
    with_dtype(a.x_dtype, [&](auto* type) {
        using TX = pointee<decltype(type)>;
        TX* out = static_cast<TX*>(a.out) + t0 * l.rows;
        for (int64_t t = 0; t < tokens; ++t) {
            const int32_t* place = place_of + t * a.top_k;
            const float* weights = a.topk_weights + (t0 + t) * a.top_k;
            for (int64_t v = 0; v < l.width(panel); ++v) {
                const int64_t first = l.first_row(panel, v);
                for_vectors(l.rows_of(panel, v), [&](int64_t i, int64_t n) {
                    const float* at = from + v * kVectorRows + i;
                    F sum = zero();
                    for (int64_t k = 0; k < a.top_k; ++k)
                        sum = fma(load(at + place[k] * kOutStride), set1(weights[k]), sum);
                    if (shared) {
                        F extra = load(at + (pairs + t) * kOutStride);
                        if (!a.fp32_combine) {
                            sum = rounded<TX>(sum);
                            extra = rounded<TX>(extra);
                        }
                        sum = sum + extra;
                    }
                    store_some(out + t * l.rows + first + i, sum, n);
                });
            }
        }
    });
}

// Few tokens: panels of experts in the order in which they lie, all outputs kept; who finishes a
// panel's last expert sums it. Many: a task takes all of a panel, and keeps it in its own cache.
inline void run_chunk(const Experts& x, bool keep_all) {
    parallel(x.first_item[x.num_segments], [&](int64_t item, int) { x.activate(item); });
    const int64_t panels = x.out_panels();
    if (!keep_all) {
        parallel(
            panels,
            [&](int64_t panel, int worker) {
                float* sums = x.sums + worker * x.places * kOutStride;
                for (int64_t i = 0; i < x.num_segments; ++i) x.project(x.segments[i], panel, sums);
                x.combine(panel, sums);
            },
            x.workers);
        return;
    }
    for (int64_t p = 0; p < panels; ++p) x.segments_left[p] = static_cast<int32_t>(x.num_segments);
    parallel(panels * x.num_segments, [&](int64_t item, int) {
        const int64_t panel = item % panels;
        float* sums = x.sums + panel * x.places * kOutStride;
        x.project(x.segments[item / panels], panel, sums);
        if (__atomic_sub_fetch(&x.segments_left[panel], 1, __ATOMIC_ACQ_REL) == 0)
            x.combine(panel, sums);
    });
}

// Hands out parts of one buffer, each at the start of a cache line.
class Carver {
  public:
    explicit Carver(char* base) : base_(base) {}
    template <class T>
    T* take(int64_t count) {
        T* at = reinterpret_cast<T*>(base_ + used_);
        used_ += lines(count * static_cast<int64_t>(sizeof(T)));
        return at;
    }
    int64_t used() const { return used_; }

  private:
    char* base_;
    int64_t used_ = 0;
};

// Buffers of a chunk of at most x.tokens tokens. Called with a null base, it only counts.
inline int64_t lay_out(Experts& x, bool keep_all, char* base, char** rows_of_x) {
    Carver from(base);
    const int64_t experts = x.a.gate_up.num_experts;
    const int64_t segments = smaller(experts, x.pairs) + blocks(x.places, kRowBlock) + 1;
    x.token_of = from.take<int32_t>(x.places);
    x.place_of = from.take<int32_t>(x.pairs);
    x.segments = from.take<Segment>(segments);
    x.first_item = from.take<int64_t>(experts + segments + 2);
    x.panels_left = from.take<int32_t>(segments);
    x.segments_left = from.take<int32_t>(x.out_panels());
    x.sums = from.take<float>((keep_all ? x.out_panels() : x.workers) * x.places * kOutStride);
    for (int i = 0; i < 2; ++i) {
        if (x.parts[i] == nullptr) continue;
        ExpertPart& p = *x.parts[i];
        const int64_t rows = i == 0 ? x.pairs : x.tokens;
        p.act = from.take<char>(rows * p.act_stride);
        p.down_rows = from.take<char>(rows * p.down_stride);
        const bool again = i == 1 && p.gate_up.form.same_as(x.parts[0]->gate_up.form);
        const bool in_place = p.gate_up.form.takes(x.a.x_dtype, false);
        rows_of_x[i] =
            from.take<char>(again || in_place ? 0 : x.a.num_tokens * p.gate_up.form.bytes());
    }
    return from.used();
}

Status moe_experts(const MoeArgs& a) {
    ExpertPart routed(a.gate_up, a.down, a.x_dtype);
    const bool has_shared = a.shared_down.data != nullptr;
    ExpertPart shared(has_shared ? a.shared_gate_up : a.gate_up,
                      has_shared ? a.shared_down : a.down, a.x_dtype);
    const int64_t chunk =
        smaller(a.num_tokens, kChunkPairs / a.top_k < 1 ? 1 : kChunkPairs / a.top_k);
    Experts first{a,
                  {&routed, has_shared ? &shared : nullptr},
                  num_workers(),
                  0,
                  chunk,
                  chunk * a.top_k,
                  0,
                  nullptr,
                  nullptr,
                  nullptr,
                  0,
                  nullptr,
                  nullptr,
                  nullptr,
                  nullptr};
    first.places = first.pairs + (has_shared ? chunk : 0);
    const int64_t panels = first.out_panels();
    const bool keep_all = panels * first.places * kOutStride * 4 <= kAllParts ||
                          panels < kTasksAWorker * first.workers;
    char* rows_of_x[2] = {};
    const int64_t bytes = lay_out(first, keep_all, nullptr, rows_of_x);
    char* base = static_cast<char*>(call_scratch(static_cast<size_t>(bytes)));
    if (base == nullptr) return kNoMemory;
    lay_out(first, keep_all, base, rows_of_x);
    const RowForm& form = routed.gate_up.form;
    routed.x = prepare_rows(form, a.x_dtype, a.x, a.num_tokens, rows_of_x[0]);
    if (has_shared)
        shared.x =
            shared.gate_up.form.same_as(form)
                ? routed.x
                : prepare_rows(shared.gate_up.form, a.x_dtype, a.x, a.num_tokens, rows_of_x[1]);
    for (int64_t t0 = 0; t0 < a.num_tokens; t0 += chunk) {
        Experts x = first;
        x.t0 = t0;
        x.tokens = smaller(chunk, a.num_tokens - t0);
        x.pairs = x.tokens * a.top_k;
        x.places = x.pairs + (has_shared ? x.tokens : 0);
        x.list();
        run_chunk(x, keep_all);
    }
    return kOk;
}
