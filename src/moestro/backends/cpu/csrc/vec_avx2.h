// AVX2 + FMA + F16C: eight fp32 lanes. Included inside a level's namespace.
#pragma once

constexpr int W = 8;
constexpr int MR = 2;  // rows of x in a register tile

struct F {
    __m256 v;
};

inline F set1(float x) { return {_mm256_set1_ps(x)}; }
inline F zero() { return {_mm256_setzero_ps()}; }
inline F operator+(F a, F b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
// min and max return b where a or b is not a number.
inline F max(F a, F b) { return {_mm256_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm256_min_ps(a.v, b.v)}; }
inline F neg(F a) { return {_mm256_xor_ps(a.v, _mm256_set1_ps(-0.0f))}; }
inline F round_even(F a) {
    return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// p * 2^n for whole n in [-252, 254]; two exact steps, rounded at most once.
inline F scale2(F p, F n) {
    const __m256i whole = _mm256_cvtps_epi32(n.v), bias = _mm256_set1_epi32(127);
    const __m256i half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
    const __m256i a = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    const __m256i b = _mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23);
    return {_mm256_mul_ps(_mm256_mul_ps(p.v, _mm256_castsi256_ps(a)), _mm256_castsi256_ps(b))};
}

// Zero where x is below `low`, y elsewhere.
inline F zero_below(F x, float low, F y) {
    const __m256 below = _mm256_cmp_ps(x.v, _mm256_set1_ps(low), _CMP_LT_OQ);
    return {_mm256_andnot_ps(below, y.v)};
}

inline F load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline F load(const bf16* p) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16))};
}
inline F load(const f16* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline void store(float* p, F x) { _mm256_storeu_ps(p, x.v); }
inline void store(bf16* p, F x) {
    const __m256i u = _mm256_castps_si256(x.v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, bias), 16);
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
    const __m256i kept = _mm256_blendv_epi8(rounded, quiet, nan);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(kept, kept), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
inline void store(f16* p, F x) {
    const __m128i h = _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), h);
}

template <class T>
inline F load_n(const T* p, int64_t n) {
    T full[W] = {};
    __builtin_memcpy(full, p, static_cast<size_t>(n) * sizeof(T));
    return load(full);
}
template <class T>
inline void store_n(T* p, F x, int64_t n) {
    T full[W];
    store(full, x);
    __builtin_memcpy(p, full, static_cast<size_t>(n) * sizeof(T));
}
// Keeps the first n lanes and puts `other` in the rest.
inline F keep_n(F x, int64_t n, float other) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i kept = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), lane);
    return {_mm256_blendv_ps(_mm256_set1_ps(other), x.v, _mm256_castsi256_ps(kept))};
}

// Four sums at once, each over all lanes in one fixed tree.
inline __m128 hsum4_lanes(const F* a) {
    const __m256 ab = _mm256_hadd_ps(a[0].v, a[1].v), cd = _mm256_hadd_ps(a[2].v, a[3].v);
    const __m256 abcd = _mm256_hadd_ps(ab, cd);
    return _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
}
inline void hsum4(const F* a, float* out) { _mm_storeu_ps(out, hsum4_lanes(a)); }
inline float hsum(F x) {
    const F four[4] = {x, x, x, x};
    return _mm_cvtss_f32(hsum4_lanes(four));
}
inline float hmax(F x) {
    float v[W];
    store(v, x);
    float m = v[0];
    for (int i = 1; i < W; ++i) m = v[i] > m || v[i] != v[i] ? v[i] : m;
    return m;
}

// out[i] lane j = in[j] lane i
inline void transpose(const F* in, F* out) {
    __m256 a[8], b[8];
    for (int i = 0; i < 4; ++i) {
        a[2 * i] = _mm256_unpacklo_ps(in[2 * i].v, in[2 * i + 1].v);
        a[2 * i + 1] = _mm256_unpackhi_ps(in[2 * i].v, in[2 * i + 1].v);
    }
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2; ++j) {
            b[4 * i + 2 * j] = _mm256_shuffle_ps(a[4 * i + j], a[4 * i + 2 + j], 0x44);
            b[4 * i + 2 * j + 1] = _mm256_shuffle_ps(a[4 * i + j], a[4 * i + 2 + j], 0xee);
        }
    for (int i = 0; i < 4; ++i) {
        out[i].v = _mm256_permute2f128_ps(b[i], b[4 + i], 0x20);
        out[4 + i].v = _mm256_permute2f128_ps(b[i], b[4 + i], 0x31);
    }
}

// 2 W bf16: the even ones and the odd ones, no shuffles.
struct EvenOdd {
    F even, odd;
};
inline EvenOdd load_even_odd(const bf16* p) {
    const __m256i u = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(u, 16))},
            {_mm256_castsi256_ps(_mm256_and_si256(u, high))}};
}
