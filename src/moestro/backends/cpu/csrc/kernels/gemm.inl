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
    using type = FastBf16;  // what the level has for it
};

template <class Dot>
struct Gemm {
    using TX = typename Dot::TX;
    using TW = typename Dot::TW;

    // c[r, j] (+)= x[r] . w[j] over k elements, for R rows of x and C rows of w.
    template <int R, int C>
    static void tile(const TX* const* x, int64_t x_offset, const TW* w, int64_t ldw, int64_t k,
                     float* c, int64_t ldc, bool add, const TW* ahead = nullptr) {
        F acc[R][C];
        for (int r = 0; r < R; ++r)
            for (int j = 0; j < C; ++j) acc[r][j] = zero();
        const TX* rows[R];
        for (int r = 0; r < R; ++r) rows[r] = x[r] + x_offset;
        int64_t i = 0;
        for (; i + Dot::STEP <= k; i += Dot::STEP) {
            typename Dot::X b[C];
            if (R == 1 && ahead != nullptr) fetch<C * Dot::STEP>(ahead + C * i);
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

    // Asks for `size` elements from p on.
    template <int size>
    static void fetch(const TW* p) {
        for (int i = 0; i < size; i += 64 / static_cast<int>(sizeof(TW)))
            __builtin_prefetch(p + i, 0, 2);
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

    // Rows of x are read where they lie.
    static bool packs(int64_t, int64_t) { return false; }
    static int64_t packed_elements(int64_t, int64_t) { return 0; }
    static void pack(const TX* const*, int64_t, int64_t, TX*) {}

    // c[i, j] = x[i] . w[j] for n rows of x and m rows of w over K elements. next: the weights that
    // will be wanted after these, or null.
    __attribute__((noinline)) static void block(const TX* const* x, const TX*, int64_t n,
                                                const TW* w, int64_t ldw, int64_t m, int64_t K,
                                                float* c, int64_t ldc, const TW* next) {
        if (n == 1) return row(x, w, ldw, m, K, c, next);
        for (int64_t k0 = 0; k0 < K; k0 += kKBlock) {
            const int64_t k = smaller(kKBlock, K - k0);
            for (int64_t i = 0; i < n; i += kPanel)
                panel(x + i, smaller(kPanel, n - i), k0, w + k0, ldw, m, k, c + i * ldc, ldc,
                      k0 > 0);
        }
    }

    static void panel(const TX* const* x, int64_t n, int64_t k0, const TW* w, int64_t ldw,
                      int64_t m, int64_t k, float* c, int64_t ldc, bool add) {
        int64_t j = 0;
        for (; j + 4 <= m; j += 4) column<4>(x, n, k0, w + j * ldw, ldw, k, c + j, ldc, add);
        for (; j < m; ++j) column<1>(x, n, k0, w + j * ldw, ldw, k, c + j, ldc, add);
    }

    // One row of x: rows of w in the order in which they lie in memory, eight at once, while the
    // next eight are asked for.
    static void row(const TX* const* x, const TW* w, int64_t ldw, int64_t m, int64_t K, float* c,
                    const TW* next) {
        int64_t j = 0;
        for (; j + 8 <= m; j += 8)
            row_tile<8>(x, w + j * ldw, ldw, K, c + j, j + 8 < m ? w + (j + 8) * ldw : next);
        for (; j < m; ++j) row_tile<1>(x, w + j * ldw, ldw, K, c + j, nullptr);
    }

    template <int C>
    static void row_tile(const TX* const* x, const TW* w, int64_t ldw, int64_t K, float* c,
                         const TW* ahead) {
        for (int64_t k0 = 0; k0 < K; k0 += kKBlock)
            tile<1, C>(x, k0, w + k0, ldw, smaller(kKBlock, K - k0), c, 0, k0 > 0,
                       ahead == nullptr ? nullptr : ahead + C * k0);
    }
};
