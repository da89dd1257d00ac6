// The driver of linear: x is packed where the micro-kernel wants it, then blocks are multiplied.

constexpr int64_t kTokenBlock = 96;   // rows of x a linear task takes; a multiple of kPanel
constexpr int64_t kWeightBlock = 64;  // rows of w a task takes

// Rows of w a task takes when rows of x are few: long runs of memory, but enough tasks to share.
inline int64_t weight_block(int64_t tokens, int64_t out_features) {
    if (tokens > 16) return kWeightBlock;
    const int64_t share = out_features / (4 * num_workers()) / kWeightBlock * kWeightBlock;
    return share < kWeightBlock ? kWeightBlock : smaller(share, 4 * kWeightBlock);
}

template <class Dot>
struct Linear {
    using TX = typename Dot::TX;
    using TW = typename Dot::TW;
    const LinearArgs& a;
    TX* packed;     // all rows of x, or null where they are read in place
    int64_t block;  // rows of w a task takes

    int64_t rows_of(int64_t t0, const TX** rows) const {
        const int64_t n = smaller(kTokenBlock, a.num_tokens - t0);
        for (int64_t i = 0; i < n; ++i)
            rows[i] = static_cast<const TX*>(a.x) + (t0 + i) * a.in_features;
        return n;
    }

    TX* packed_at(int64_t t0) const {
        return packed + Gemm<Dot>::packed_elements(t0, a.in_features);
    }

    void pack(int64_t task) const {
        const TX* rows[kTokenBlock];
        const int64_t n = rows_of(task * kTokenBlock, rows);
        Gemm<Dot>::pack(rows, n, a.in_features, packed_at(task * kTokenBlock));
    }

    void run(int64_t t0, int64_t m0) const {
        const int64_t K = a.in_features, M = a.out_features, m = smaller(block, M - m0);
        const TX* rows[kTokenBlock];
        const int64_t n = rows_of(t0, rows);
        alignas(64) float c[kTokenBlock * kWeightBlock];
        const TW* w = static_cast<const TW*>(a.weight) + m0 * K;
        const TX* there = packed == nullptr ? rows[0] : packed_at(t0);
        Gemm<Dot>::block(rows, there, n, w, K, m, K, c, block, nullptr);
        with_dtype(a.out_dtype, [&](auto* type) {
            using TO = pointee<decltype(type)>;
            TO* out = static_cast<TO*>(a.out) + t0 * M + m0;
            for (int64_t i = 0; i < n; ++i)
                for_vectors(m, [&](int64_t j, int64_t lanes) {
                    store_some(out + i * M + j, load_some(c + i * block + j, lanes), lanes);
                });
        });
    }
};

template <class Dot>
Status linear_of(const LinearArgs& a) {
    using TX = typename Dot::TX;
    TX* packed = nullptr;
    if (Gemm<Dot>::packs(a.num_tokens, a.in_features)) {
        const int64_t size = Gemm<Dot>::packed_elements(a.num_tokens, a.in_features);
        packed = static_cast<TX*>(call_scratch(static_cast<size_t>(size) * sizeof(TX)));
        if (packed == nullptr) return kNoMemory;
    }
    const Linear<Dot> run{a, packed, weight_block(a.num_tokens, a.out_features)};
    const int64_t token_blocks = blocks(a.num_tokens, kTokenBlock);
    if (packed != nullptr) parallel(token_blocks, [&](int64_t task, int) { run.pack(task); });
    parallel(token_blocks * blocks(a.out_features, run.block), [&](int64_t task, int) {
        run.run(task % token_blocks * kTokenBlock, task / token_blocks * run.block);
    });
    return kOk;
}

// Calls fn with a null pointer to the dot of the two element types: equal ones, or fp32 x.
template <class Fn>
void with_dot(int32_t x_dtype, int32_t weight_dtype, Fn&& fn) {
    with_dtype(weight_dtype, [&](auto* w) {
        using TW = pointee<decltype(w)>;
        if (x_dtype == kF32)
            fn(static_cast<typename DotOf<float, TW>::type*>(nullptr));
        else
            fn(static_cast<typename DotOf<TW, TW>::type*>(nullptr));
    });
}

Status linear(const LinearArgs& a) {
    Status status = kOk;
    with_dot(a.x_dtype, a.weight_dtype,
             [&](auto* dot) { status = linear_of<pointee<decltype(dot)>>(a); });
    return status;
}
