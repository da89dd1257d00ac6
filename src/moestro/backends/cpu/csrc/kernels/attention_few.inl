// Products of a few query rows (a decoding token's group of heads) with a tile's keys and values.
//
// Packing a tile pays when many rows use it. For up to sixteen rows keys stay as they lie: a key's
// pair is broadcast to lanes that are rows, and pairs of values are made in registers. Every sum
// keeps the order and the operands of the packed products, so both ways give the same bits.

// A register tile: rows of one factor, vectors of the other.
template <int R, int C>
struct Block {
    static constexpr int kRows = R, kVectors = C;
};

// [pair][lanes]: the rows' pairs side by side, zeros from `rows` on.
inline void lay_rows_in_lanes(const bf16* q, int64_t ldq, int64_t rows, int64_t lanes,
                              int64_t pairs, uint32_t* to) {
    for (int64_t p = 0; p < pairs; ++p)
        for (int64_t r = 0; r < lanes; ++r) {
            uint32_t pair = 0;
            if (r < rows) __builtin_memcpy(&pair, q + r * ldq + 2 * p, 4);
            to[p * lanes + r] = pair;
        }
}

template <int Lanes>
struct FewRows;

template <>
struct FewRows<8> {
    using V = __m256;
    static V zero() { return _mm256_setzero_ps(); }
    static V add_dot(V sum, const uint32_t* q, int32_t pair) {
        const __m256i rows = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
        return _mm256_dpbf16_ps(sum, (__m256bh)rows, (__m256bh)_mm256_set1_epi32(pair));
    }
    // Sixteen positions' sums into scores[row][position].
    static void write(const V* sums, float* scores, int64_t ld) {
        __m512 z[8], t[8];
        for (int k = 0; k < 8; ++k)
            z[k] = _mm512_insertf32x8(_mm512_castps256_ps512(sums[k]), sums[k + 8], 1);
        for (int h = 0; h < 8; h += 4) {
            const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(z[h], z[h + 1]));
            const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(z[h], z[h + 1]));
            const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(z[h + 2], z[h + 3]));
            const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(z[h + 2], z[h + 3]));
            t[h] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
            t[h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
            t[h + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
            t[h + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
        }
        const __m512i even = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
        const __m512i odd = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
        for (int r = 0; r < 4; ++r) {
            const __m512d x = _mm512_castps_pd(t[r]), y = _mm512_castps_pd(t[r + 4]);
            _mm512_storeu_pd(scores + r * ld, _mm512_permutex2var_pd(x, even, y));
            _mm512_storeu_pd(scores + (r + 4) * ld, _mm512_permutex2var_pd(x, odd, y));
        }
    }
};

template <>
struct FewRows<16> {
    using V = __m512;
    static V zero() { return _mm512_setzero_ps(); }
    static V add_dot(V sum, const uint32_t* q, int32_t pair) {
        const __m512bh rows = (__m512bh)_mm512_loadu_si512(q);
        return _mm512_dpbf16_ps(sum, rows, (__m512bh)_mm512_set1_epi32(pair));
    }
    static void write(const V* sums, float* scores, int64_t ld) {
        __m512i in[16], out[16];
        for (int k = 0; k < 16; ++k) in[k] = _mm512_castps_si512(sums[k]);
        transpose16(in, out);
        for (int r = 0; r < 16; ++r) _mm512_storeu_si512(scores + r * ld, out[r]);
    }
};

// scores[row][16 positions] of keys that lie `stride` apart. ahead: memory that is read soon, of
// which `step` bytes are fetched with every pair.
template <int Lanes>
inline void score_sixteen(const uint32_t* q, const bf16* keys, int64_t stride, int64_t pairs,
                          const char* ahead, int64_t step, float* scores, int64_t ld) {
    using Rows = FewRows<Lanes>;
    typename Rows::V sums[16];
    for (int k = 0; k < 16; ++k) sums[k] = Rows::zero();
    const bf16* four[4] = {keys, keys + 4 * stride, keys + 8 * stride, keys + 12 * stride};
    for (int64_t p = 0; p < pairs; ++p) {
        __builtin_prefetch(ahead + p * step, 0, 2);
        for (int g = 0; g < 4; ++g)
            for (int k = 0; k < 4; ++k) {
                int32_t pair;
                __builtin_memcpy(&pair, four[g] + k * stride + 2 * p, 4);
                sums[4 * g + k] = Rows::add_dot(sums[4 * g + k], q + p * Lanes, pair);
            }
    }
    Rows::write(sums, scores, ld);
}

// acc[R rows][C chunks of 32 dims] += weights * values over positions in pairs; of an odd number
// the last one alone. ahead: rows that are read soon.
template <int R, int C>
inline void weigh_block(const bf16* weights, int64_t ldw, const bf16* const* values, int64_t n,
                        int64_t d, const bf16* const* ahead, float* acc, int64_t lda) {
    __m512 sums[R][2 * C];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < 2 * C; ++i) sums[r][i] = _mm512_loadu_ps(acc + r * lda + d + 16 * i);
    for (int64_t j = 0; j < n; j += 2) {
        __m512bh v[2 * C];
        const bool both = j + 1 < n;
        for (int i = 0; i < C; ++i) {
            __builtin_prefetch(ahead[j] + d + 32 * i, 0, 2);
            if (both) __builtin_prefetch(ahead[j + 1] + d + 32 * i, 0, 2);
            const __m512i x = _mm512_loadu_si512(values[j] + d + 32 * i);
            const __m512i y =
                both ? _mm512_loadu_si512(values[j + 1] + d + 32 * i) : _mm512_setzero_si512();
            v[2 * i] = (__m512bh)_mm512_unpacklo_epi16(x, y);
            v[2 * i + 1] = (__m512bh)_mm512_unpackhi_epi16(x, y);
        }
        for (int r = 0; r < R; ++r) {
            int32_t pair;
            __builtin_memcpy(&pair, weights + r * ldw + j, 4);
            const __m512bh w = (__m512bh)_mm512_set1_epi32(pair);
            for (int i = 0; i < 2 * C; ++i) sums[r][i] = _mm512_dpbf16_ps(sums[r][i], w, v[i]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < 2 * C; ++i) _mm512_storeu_ps(acc + r * lda + d + 16 * i, sums[r][i]);
}

// All dims (whole chunks of 32) of R rows.
template <int R, int C>
inline void weigh_rows(const bf16* weights, int64_t ldw, const bf16* const* values, int64_t n,
                       int64_t dim, const bf16* const* ahead, float* acc, int64_t lda) {
    int64_t d = 0;
    for (; d + 32 * C <= dim; d += 32 * C)
        weigh_block<R, C>(weights, ldw, values, n, d, ahead, acc, lda);
    for (; d < dim; d += 32) weigh_block<R, 1>(weights, ldw, values, n, d, ahead, acc, lda);
}

inline void weigh_few(const bf16* weights, int64_t ldw, int64_t rows, const bf16* const* values,
                      int64_t n, int64_t dim, const bf16* const* ahead, float* acc, int64_t lda) {
    int64_t r = 0;
    const auto take = [&](auto kind, int64_t count) {
        using Kind = decltype(kind);
        weigh_rows<Kind::kRows, Kind::kVectors>(weights + r * ldw, ldw, values, n, dim, ahead,
                                                acc + r * lda, lda);
        r += count;
    };
    while (r + 8 <= rows) take(Block<8, 1>(), 8);
    if (rows - r >= 4) take(Block<4, 2>(), 4);
    if (rows - r >= 2) take(Block<2, 4>(), 2);
    if (rows - r >= 1) take(Block<1, 4>(), 1);
}
