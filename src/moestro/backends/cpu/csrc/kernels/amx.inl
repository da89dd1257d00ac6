// bf16 x bf16 on the tile unit (AMX-BF16). Included after gemm.inl by the amx level.
//
// A tile of 16 rows of w times a tile of up to 16 rows of x, 32 elements of K at a time, from low
// to high k over the whole of K: each output has one accumulator of its own, so it depends on its
// row of x and its row of w only. Rows of w are read where they lie; rows of x are packed first.

template <>
struct Gemm<FastBf16> {
    using TX = bf16;
    using TW = bf16;
    // A single row of whole chunks lies packed as it is.
    static bool packs(int64_t n, int64_t K) { return n > 1 || K % kTileK != 0; }

    static int64_t chunks(int64_t K) { return blocks(K, kTileK); }

    // Groups of 16 rows (the last one as narrow as it is): [chunk][pair of k][row], zeros past K.
    static int64_t packed_elements(int64_t n, int64_t K) { return n * chunks(K) * kTileK; }

    static void pack(const bf16* const* x, int64_t n, int64_t K, bf16* packed) {
        for (int64_t g = 0; g < n; g += kTileRows) {
            const int64_t rows = smaller(kTileRows, n - g);
            pack_group(x + g, rows, K, packed + packed_elements(g, K));
        }
    }

    static void pack_group(const bf16* const* x, int64_t rows, int64_t K, bf16* packed) {
        if (rows > 1) return pack_tile_rows(x, rows, rows, K, packed);
        __builtin_memcpy(packed, x[0], static_cast<size_t>(K) * 2);
        for (int64_t k = K; k < chunks(K) * kTileK; ++k) packed[k].bits = 0;
    }

    // c[i, j] = x[i] . w[j] for n packed rows of x and m rows of w. next: the weights that will be
    // wanted after these, or null.
    __attribute__((noinline)) static void block(const bf16* const*, const bf16* packed, int64_t n,
                                                const bf16* w, int64_t ldw, int64_t m, int64_t K,
                                                float* c, int64_t ldc, const bf16* next) {
        for (int64_t g = 0; g < n; g += 2 * kTileRows) {
            const int64_t x0 = smaller(kTileRows, n - g), x1 = smaller(kTileRows, n - g - x0);
            const bf16* p0 = packed + packed_elements(g, K);
            const bf16* p1 = p0 + packed_elements(x0, K);
            int64_t w0 = 0, w1 = 0;
            for (int64_t j = 0; j < m; j += 2 * kTileRows) {
                const int64_t a0 = smaller(kTileRows, m - j), a1 = smaller(kTileRows, m - j - a0);
                if (a0 != w0 || a1 != w1) configure_tiles(w0 = a0, w1 = a1, x0, x1);
                const bf16* ahead = j + 2 * kTileRows < m ? w + (j + 2 * kTileRows) * ldw : next;
                Product p{w + j * ldw, ldw, a0, a1, p0, p1, x0, x1, K, g == 0 ? ahead : nullptr};
                p.run(c + g * ldc + j, ldc);
            }
        }
        _tile_release();
    }

    // Up to 32 rows of w times up to 32 rows of x.
    struct Product {
        const bf16* w;
        int64_t ldw, w0, w1;
        const bf16 *p0, *p1;
        int64_t x0, x1, K;
        const bf16* ahead;

        void run(float* c, int64_t ldc) const {
            alignas(64) float sums[4][kTileRows * kTileRows];
            if (w1 > 0 && x1 > 0)
                multiply<true, true>(sums);
            else if (w1 > 0)
                multiply<true, false>(sums);
            else if (x1 > 0)
                multiply<false, true>(sums);
            else
                multiply<false, false>(sums);
            put(sums[0], w0, x0, c, ldc);
            put(sums[1], w0, x1, c + kTileRows * ldc, ldc);
            put(sums[2], w1, x0, c + kTileRows, ldc);
            put(sums[3], w1, x1, c + kTileRows * ldc + kTileRows, ldc);
        }

        // sums holds rows of w, c rows of x.
        static void put(const float* sums, int64_t rows, int64_t columns, float* c, int64_t ldc) {
            if (rows == 0 || columns == 0) return;
            if (columns == 1) {
                for (int64_t j = 0; j < rows; ++j) c[j] = sums[j * kTileRows];
                return;
            }
            __m512i in[16], out[16];
            for (int i = 0; i < 16; ++i) in[i] = _mm512_load_si512(sums + i * kTileRows);
            transpose16(in, out);
            const __mmask16 some = first(rows);
            for (int64_t i = 0; i < columns; ++i)
                _mm512_mask_storeu_epi32(c + i * ldc, some, out[i]);
        }

        template <bool W1, bool X1>
        void multiply(float (*sums)[kTileRows * kTileRows]) const {
            _tile_zero(0);
            if (X1) _tile_zero(1);
            if (W1) _tile_zero(2);
            if (W1 && X1) _tile_zero(3);
            const int64_t whole = K / kTileK * kTileK;
            const bf16* later = w + kTileRows * ldw;
            for (int64_t k = 0; k < whole; k += kTileK) {
                fetch(k);
                step<W1, X1>(w + k, later + k, ldw * 2, k);
            }
            if (whole < K) {
                alignas(64) bf16 tail[2 * kTileRows * kTileK] = {};
                for (int64_t j = 0; j < w0 + w1; ++j)
                    __builtin_memcpy(tail + j * kTileK, w + j * ldw + whole,
                                     static_cast<size_t>(K - whole) * 2);
                make_visible(tail);
                step<W1, X1>(tail, tail + kTileRows * kTileK, 64, whole);
            }
            _tile_stored(0, sums[0], 64);
            if (X1) _tile_stored(1, sums[1], 64);
            if (W1) _tile_stored(2, sums[2], 64);
            if (W1 && X1) _tile_stored(3, sums[3], 64);
        }

        template <bool W1, bool X1>
        void step(const bf16* a0, const bf16* a1, int64_t stride, int64_t k) const {
            _tile_loadd(4, a0, stride);
            if (W1) _tile_loadd(5, a1, stride);
            _tile_loadd(6, p0 + k * x0, 4 * x0);
            if (X1) _tile_loadd(7, p1 + k * x1, 4 * x1);
            _tile_dpbf16ps(0, 4, 6);
            if (X1) _tile_dpbf16ps(1, 4, 7);
            if (W1) _tile_dpbf16ps(2, 5, 6);
            if (W1 && X1) _tile_dpbf16ps(3, 5, 7);
        }

        // The weights come from memory: ask for the next rows in the order in which they lie, while
        // these are used in columns.
        void fetch(int64_t k) const {
            if (ahead == nullptr) return;
            const char* at = reinterpret_cast<const char*>(ahead) + k * 2 * (w0 + w1);
            for (int64_t i = 0; i < w0 + w1; ++i) _mm_prefetch(at + 64 * i, _MM_HINT_T1);
        }
    };
};
