// What the sampler needs beyond F: lane bits of comparisons, compaction, and vectors of doubles and
// 64-bit words that are as wide as F (so half as many lanes), in GNU C++ that maps to any target.
//
// Everything that decides a token is integers or single IEEE operations on doubles: the same bits
// at every level.

constexpr int H = W / 2;
typedef double VD __attribute__((vector_size(4 * W)));
typedef int64_t VL __attribute__((vector_size(4 * W)));
typedef uint64_t VU __attribute__((vector_size(4 * W)));
typedef int32_t VI __attribute__((vector_size(4 * W)));
typedef float VH __attribute__((vector_size(2 * W)));

constexpr float kInfinity = __builtin_inff();
constexpr float kLowest = -3.4028234663852886e38f;

#if defined(__AVX512F__)
inline uint32_t ge_bits(F a, F b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
inline uint32_t eq_bits(F a, F b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
// NaN (quiet or signalling) or an infinity
inline uint32_t odd_bits(F a) { return _mm512_fpclass_ps_mask(a.v, 0x99); }
inline F keep_bits(F x, uint32_t bits, float other) {
    return {_mm512_mask_mov_ps(_mm512_set1_ps(other), static_cast<__mmask16>(bits), x.v)};
}
inline F add_bits(F sum, F x, uint32_t bits) {
    return {_mm512_mask_add_ps(sum.v, static_cast<__mmask16>(bits), sum.v, x.v)};
}
inline F truncated_as_float(F x) { return {_mm512_castsi512_ps(_mm512_cvttps_epi32(x.v))}; }
inline F from_int(VI x) { return {_mm512_cvtepi32_ps((__m512i)x)}; }
// Writes the lanes of `bits` to p, which has room for W floats. In registers: a compressing store
// is microcode on some processors.
inline void compress(float* p, F x, uint32_t bits) {
    _mm512_storeu_ps(p, _mm512_maskz_compress_ps(static_cast<__mmask16>(bits), x.v));
}
#else
inline uint32_t lane_bits(VI m) {
#if defined(__AVX2__)
    return static_cast<uint32_t>(_mm256_movemask_ps((__m256)m));
#else
    uint32_t bits = 0;
    for (int j = 0; j < W; ++j) bits |= (static_cast<uint32_t>(m[j]) & 1u) << j;
    return bits;
#endif
}
inline uint32_t ge_bits(F a, F b) { return lane_bits((VI)(a.v >= b.v)); }
inline uint32_t eq_bits(F a, F b) { return lane_bits((VI)(a.v == b.v)); }
inline uint32_t odd_bits(F a) {
    const VI exponent = (VI)a.v & 0x7f800000;
    return lane_bits((VI)(exponent == 0x7f800000));
}
inline F keep_bits(F x, uint32_t bits, float other) {
    F r;
    for (int j = 0; j < W; ++j) r.v[j] = bits >> j & 1u ? x.v[j] : other;
    return r;
}
inline F add_bits(F sum, F x, uint32_t bits) { return sum + keep_bits(x, bits, 0.0f); }
inline F truncated_as_float(F x) {
    F r;
    const VI whole = __builtin_convertvector(x.v, VI);
    __builtin_memcpy(&r.v, &whole, sizeof whole);
    return r;
}
inline F from_int(VI x) { return {__builtin_convertvector(x, decltype(F::v))}; }
inline void compress(float* p, F x, uint32_t bits) {
    for (; bits != 0; bits &= bits - 1) *p++ = x.v[__builtin_ctz(bits)];
}
#endif

inline uint32_t first_bits(int64_t n) {
    return n >= W ? (W == 16 ? 0xffffu : 0xffu) : (1u << n) - 1;
}

inline VD setd(double x) { return VD{} + x; }
inline VU setu(uint64_t x) { return VU{} + x; }

// a * b + c, rounded once where the target has that: for what no token hangs on.
inline VD fused(VD a, VD b, VD c) {
#if defined(__AVX512F__)
    return (VD)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__)
    return (VD)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
    return a * b + c;
#endif
}

// H floats, widened exactly.
inline VD load_doubles(const float* p) {
#if defined(__AVX512F__)
    return (VD)_mm512_cvtps_pd(_mm256_loadu_ps(p));
#else
    VH h;
    __builtin_memcpy(&h, p, sizeof h);
    return __builtin_convertvector(h, VD);
#endif
}

// The whole part of 0 <= x < 2^51, as integers.
inline VL whole_of(VD x) {
#if defined(__AVX512DQ__)
    return (VL)_mm512_cvttpd_epi64((__m512d)x);
#else
    const VD magic = setd(4503599627370496.0);
    VD r = (x + magic) - magic;
    r = r > x ? r - 1.0 : r;
    return (VL)(r + magic) - (VL)magic;
#endif
}

template <class T>
inline int64_t total_of(T v) {
    int64_t sum = 0;
    for (int j = 0; j < H; ++j) sum += static_cast<int64_t>(v[j]);
    return sum;
}
