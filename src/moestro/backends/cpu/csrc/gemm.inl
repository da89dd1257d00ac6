// The dot-product kernel behind linear and moe_experts.
//
// Both operands run along K. K is cut into blocks of kKBlock elements; within a block every output
// has one vector accumulator, filled from low to high k and summed over its lanes in one fixed
// tree; block sums are added in order. So an output depends on its row of x and its row of w, and
// on nothing else: not on the tile that computed it, nor on how many rows there are.

constexpr int64_t kKBlock = 1024;
constexpr int64_t kPanel = 12;  // rows of x kept in the first-level cache; a multiple of MR

// Any pair of element types, widened to fp32.
template <class A, class B>
struct DotWide {
    using TX = A;
    using TW = B;
    static constexpr int STEP = W;
    using X = F;
    static F load_x(const A* p) { return load(p); }
    static F load_w(const B* p) { return load(p); }
    static F load_x_n(const A* p, int64_t n) { return load_n(p, n); }
    static F load_w_n(const B* p, int64_t n) { return load_n(p, n); }
    static F mac(F acc, F x, F w) { return fma(x, w, acc); }
};

template <class A, class B>
struct DotOf {
    using type = DotWide<A, B>;
};
template <>
struct DotOf<bf16, bf16> {
    using type = DotBf16;
};

template <class Dot>
struct Gemm {
    using TX = typename Dot::TX;
    using TW = typename Dot::TW;

    // c[r, j] (+)= x[r] . w[j] over k elements, for R rows of x and C rows of w.
    template <int R, int C>
    static void tile(const TX* const* x, int64_t x_offset, const TW* w, int64_t ldw, int64_t k,
                     float* c, int64_t ldc, bool add) {
        F acc[R][C];
        for (int r = 0; r < R; ++r)
            for (int j = 0; j < C; ++j) acc[r][j] = zero();
        const TX* rows[R];
        for (int r = 0; r < R; ++r) rows[r] = x[r] + x_offset;
        int64_t i = 0;
        for (; i + Dot::STEP <= k; i += Dot::STEP) {
            typename Dot::X b[C];
            for (int j = 0; j < C; ++j) b[j] = Dot::load_w(w + j * ldw + i);
            for (int r = 0; r < R; ++r) {
                const typename Dot::X a = Dot::load_x(rows[r] + i);
                for (int j = 0; j < C; ++j) acc[r][j] = Dot::mac(acc[r][j], a, b[j]);
            }
        }
        if (i < k) {
            typename Dot::X b[C];
            for (int j = 0; j < C; ++j) b[j] = Dot::load_w_n(w + j * ldw + i, k - i);
            for (int r = 0; r < R; ++r) {
                const typename Dot::X a = Dot::load_x_n(rows[r] + i, k - i);
                for (int j = 0; j < C; ++j) acc[r][j] = Dot::mac(acc[r][j], a, b[j]);
            }
        }
        for (int r = 0; r < R; ++r) put_sums<C>(acc[r], c + r * ldc, add);
    }

    template <int C>
    static void put_sums(const F* acc, float* c, bool add) {
        float sums[C];
        if constexpr (C % 4 == 0)
            for (int j = 0; j < C; j += 4) hsum4(acc + j, sums + j);
        else
            for (int j = 0; j < C; ++j) sums[j] = hsum(acc[j]);
        for (int j = 0; j < C; ++j) c[j] = add ? c[j] + sums[j] : sums[j];
    }

    template <int C>
    static void column(const TX* const* x, int64_t n, int64_t x_offset, const TW* w, int64_t ldw,
                       int64_t k, float* c, int64_t ldc, bool add) {
        int64_t i = 0;
        for (; i + MR <= n; i += MR) tile<MR, C>(x + i, x_offset, w, ldw, k, c + i * ldc, ldc, add);
        if constexpr (MR == 4) {
            if (n - i == 3) tile<3, C>(x + i, x_offset, w, ldw, k, c + i * ldc, ldc, add);
            if (n - i == 2) tile<2, C>(x + i, x_offset, w, ldw, k, c + i * ldc, ldc, add);
        }
        if (n - i == 1) tile<1, C>(x + i, x_offset, w, ldw, k, c + i * ldc, ldc, add);
    }

    // c[i, j] = x[i] . w[j] for n rows of x and m rows of w over K elements.
    static void block(const TX* const* x, int64_t n, const TW* w, int64_t ldw, int64_t m, int64_t K,
                      float* c, int64_t ldc) {
        for (int64_t k0 = 0; k0 < K; k0 += kKBlock) {
            const int64_t k = K - k0 < kKBlock ? K - k0 : kKBlock;
            const bool add = k0 > 0;
            if (n == 1) {
                row(x, k0, w + k0, ldw, m, k, c, add);
                continue;
            }
            for (int64_t i = 0; i < n; i += kPanel) {
                const int64_t rows = n - i < kPanel ? n - i : kPanel;
                panel(x + i, rows, k0, w + k0, ldw, m, k, c + i * ldc, ldc, add);
            }
        }
    }

    static void panel(const TX* const* x, int64_t n, int64_t k0, const TW* w, int64_t ldw,
                      int64_t m, int64_t k, float* c, int64_t ldc, bool add) {
        int64_t j = 0;
        for (; j + 4 <= m; j += 4) column<4>(x, n, k0, w + j * ldw, ldw, k, c + j, ldc, add);
        for (; j < m; ++j) column<1>(x, n, k0, w + j * ldw, ldw, k, c + j, ldc, add);
    }

    // One row of x: more rows of w at once, for more loads in flight.
    static void row(const TX* const* x, int64_t k0, const TW* w, int64_t ldw, int64_t m, int64_t k,
                    float* c, bool add) {
        int64_t j = 0;
        for (; j + 8 <= m; j += 8) tile<1, 8>(x, k0, w + j * ldw, ldw, k, c + j, 0, add);
        for (; j + 4 <= m; j += 4) tile<1, 4>(x, k0, w + j * ldw, ldw, k, c + j, 0, add);
        for (; j < m; ++j) tile<1, 1>(x, k0, w + j * ldw, ldw, k, c + j, 0, add);
    }
};

constexpr int64_t kTokenBlock = 96;   // rows of x a linear task takes; a multiple of kPanel
constexpr int64_t kWeightBlock = 64;  // rows of w a task takes

inline int64_t blocks(int64_t size, int64_t block) { return (size + block - 1) / block; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <class Dot>
void linear_of(const LinearArgs& a) {
    using TX = typename Dot::TX;
    using TW = typename Dot::TW;
    const int64_t K = a.in_features, M = a.out_features;
    const int64_t token_blocks = blocks(a.num_tokens, kTokenBlock);
    const int64_t weight_blocks = blocks(M, kWeightBlock);
    parallel(token_blocks * weight_blocks, [&](int64_t task, int) {
        const int64_t t0 = task % token_blocks * kTokenBlock;
        const int64_t m0 = task / token_blocks * kWeightBlock;
        const int64_t n = smaller(kTokenBlock, a.num_tokens - t0);
        const int64_t m = smaller(kWeightBlock, M - m0);
        const TX* rows[kTokenBlock];
        for (int64_t i = 0; i < n; ++i) rows[i] = static_cast<const TX*>(a.x) + (t0 + i) * K;
        alignas(64) float c[kTokenBlock * kWeightBlock];
        const TW* w = static_cast<const TW*>(a.weight) + m0 * K;
        Gemm<Dot>::block(rows, n, w, K, m, K, c, kWeightBlock);
        with_dtype(a.out_dtype, [&](auto* type) {
            using TO = pointee<decltype(type)>;
            TO* out = static_cast<TO*>(a.out) + t0 * M + m0;
            for (int64_t i = 0; i < n; ++i)
                for_vectors(m, [&](int64_t j, int64_t lanes) {
                    store_some(out + i * M + j, load_some(c + i * kWeightBlock + j, lanes), lanes);
                });
        });
    });
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

void linear(const LinearArgs& a) {
    with_dot(a.x_dtype, a.weight_dtype, [&](auto* dot) { linear_of<pointee<decltype(dot)>>(a); });
}
