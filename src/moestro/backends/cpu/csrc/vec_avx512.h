// AVX-512 (F, BW, VL, DQ, BF16): sixteen fp32 lanes. Included inside a level's namespace.
#pragma once

constexpr int W = 16;
constexpr int MR = 4;  // rows of x in a register tile

struct F {
    __m512 v;
};

inline F set1(float x) { return {_mm512_set1_ps(x)}; }
inline F zero() { return {_mm512_setzero_ps()}; }
inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// min and max return b where a or b is not a number.
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F neg(F a) { return {_mm512_xor_ps(a.v, _mm512_set1_ps(-0.0f))}; }
inline F round_even(F a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// p * 2^n for whole n, rounded once.
inline F scale2(F p, F n) { return {_mm512_scalef_ps(p.v, n.v)}; }

inline __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline F widen(__m256i h, const bf16*) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
inline F widen(__m256i h, const f16*) { return {_mm512_cvtph_ps(h)}; }
inline __m256i narrow(F x, const bf16*) {
    const __m512i u = _mm512_castps_si512(x.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, bias), 16);
    const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
    const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, quiet));
}
inline __m256i narrow(F x, const f16*) {
    return _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// Zero where x is below `low`, y elsewhere.
inline F zero_below(F x, float low, F y) {
    const __mmask16 kept = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(low), _CMP_NLT_UQ);
    return {_mm512_maskz_mov_ps(kept, y.v)};
}

inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F load_n(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
inline void store_n(float* p, F x, int64_t n) { _mm512_mask_storeu_ps(p, first(n), x.v); }
template <class T>
inline F load(const T* p) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), p);
}
template <class T>
inline F load_n(const T* p, int64_t n) {
    return widen(_mm256_maskz_loadu_epi16(first(n), p), p);
}
template <class T>
inline void store(T* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x, p));
}
template <class T>
inline void store_n(T* p, F x, int64_t n) {
    _mm256_mask_storeu_epi16(p, first(n), narrow(x, p));
}
// Keeps the first n lanes and puts `other` in the rest.
inline F keep_n(F x, int64_t n, float other) {
    return {_mm512_mask_mov_ps(_mm512_set1_ps(other), first(n), x.v)};
}

// Four sums at once, each over all lanes in one fixed tree.
inline __m128 hsum4_lanes(const F* a) {
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a[0].v, a[1].v, 0x88),
                                    _mm512_shuffle_f32x4(a[0].v, a[1].v, 0xdd));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(a[2].v, a[3].v, 0x88),
                                    _mm512_shuffle_f32x4(a[2].v, a[3].v, 0xdd));
    const __m512 abcd =
        _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    const __m512 pairs = _mm512_add_ps(abcd, _mm512_permute_ps(abcd, 0xb1));
    const __m512 sums = _mm512_add_ps(pairs, _mm512_permute_ps(pairs, 0x4e));
    const __m512i pick = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_castps512_ps128(_mm512_permutexvar_ps(pick, sums));
}
inline void hsum4(const F* a, float* out) { _mm_storeu_ps(out, hsum4_lanes(a)); }
inline float hsum(F x) {
    const F four[4] = {x, x, x, x};
    return _mm_cvtss_f32(hsum4_lanes(four));
}
inline float hmax(F x) {
    if (_mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q)) return __builtin_nanf("");
    return _mm512_reduce_max_ps(x.v);
}

// out[i][j] = in[j][i], 16 x 16 words.
__attribute__((always_inline)) inline void transpose16(const __m512i* in, __m512i* out) {
    __m512i a[16], b[16];
    for (int i = 0; i < 8; ++i) {
        a[2 * i] = _mm512_unpacklo_epi32(in[2 * i], in[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(in[2 * i], in[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 2; ++j) {
            b[4 * i + 2 * j] = _mm512_unpacklo_epi64(a[4 * i + j], a[4 * i + 2 + j]);
            b[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(a[4 * i + j], a[4 * i + 2 + j]);
        }
    for (int i = 0; i < 4; ++i) {
        const __m512i lo01 = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);
        const __m512i hi01 = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
        const __m512i lo23 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
        const __m512i hi23 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
        out[i] = _mm512_shuffle_i32x4(lo01, lo23, 0x88);
        out[4 + i] = _mm512_shuffle_i32x4(hi01, hi23, 0x88);
        out[8 + i] = _mm512_shuffle_i32x4(lo01, lo23, 0xdd);
        out[12 + i] = _mm512_shuffle_i32x4(hi01, hi23, 0xdd);
    }
}

// out[i] lane j = in[j] lane i
inline void transpose(const F* in, F* out) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_castps_si512(in[i].v);
    transpose16(a, b);
    for (int i = 0; i < 16; ++i) out[i].v = _mm512_castsi512_ps(b[i]);
}
