// Lines of packed weights times broadcast activations: AVX2, in halves of eight rows.

constexpr bool kDotsBf16 = false;  // bf16 activations are widened to fp32

struct Sums {
    __m256i half[2];
};
inline Sums all_sums(int32_t x) { return {{_mm256_set1_epi32(x), _mm256_set1_epi32(x)}}; }
inline Lanes to_lanes(const Sums& a) {
    return {{{_mm256_cvtepi32_ps(a.half[0])}, {_mm256_cvtepi32_ps(a.half[1])}}};
}
inline Sums times_zeros(const uint8_t* zeros, int32_t x) {
    Sums r;
    for (int i = 0; i < 2; ++i) {
        const __m128i z = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(zeros + 8 * i));
        r.half[i] = _mm256_mullo_epi32(_mm256_cvtepu8_epi32(z), _mm256_set1_epi32(x));
    }
    return r;
}

inline Lanes fused(const Lanes& a, const Lanes& b, const Lanes& c) { return fma(a, b, c); }

struct Codes {  // unsigned weights, 16 rows x 4 k
    __m256i half[2];
};
using Signed = __m256i;  // 4 k of one row of activations, in every lane
inline __m256i load_half(const void* line, int i) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(line) + i);
}
inline Codes load_codes(const uint8_t* line) { return {{load_half(line, 0), load_half(line, 1)}}; }
inline Codes low_codes(const Codes& line) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {{_mm256_and_si256(line.half[0], mask), _mm256_and_si256(line.half[1], mask)}};
}
inline Codes high_codes(const Codes& line) {
    return low_codes({{_mm256_srli_epi16(line.half[0], 4), _mm256_srli_epi16(line.half[1], 4)}});
}
inline Signed spread_signed(const int8_t* x) {
    int32_t word;
    __builtin_memcpy(&word, x, 4);
    return _mm256_set1_epi32(word);
}
// vpmaddubsw would saturate: 255 * 127 * 2 has 17 bits.
inline Sums dot_codes(const Sums& a, const Codes& w, Signed x) {
    const __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8);
    const __m256i x_odd = _mm256_srai_epi16(x, 8);
    Sums r;
    for (int i = 0; i < 2; ++i) {
        const __m256i even = _mm256_and_si256(w.half[i], _mm256_set1_epi16(255));
        const __m256i odd = _mm256_srli_epi16(w.half[i], 8);
        r.half[i] = _mm256_add_epi32(a.half[i], _mm256_add_epi32(_mm256_madd_epi16(even, x_even),
                                                                 _mm256_madd_epi16(odd, x_odd)));
    }
    return r;
}
inline Sums dot_nibbles(const Sums& a, const Codes& w, Signed x) {
    Sums r;
    for (int i = 0; i < 2; ++i)
        r.half[i] = _mm256_add_epi32(
            a.half[i], _mm256_madd_epi16(_mm256_maddubs_epi16(w.half[i], x), _mm256_set1_epi16(1)));
    return r;
}

struct Pairs {  // bf16 weights, 16 rows x 2 k
    __m256i half[2];
};
inline Pairs load_pairs(const void* line) { return {{load_half(line, 0), load_half(line, 1)}}; }
inline Lanes even_of(const Pairs& w) {
    return lanes_of(
        [&](int i) { return F{_mm256_castsi256_ps(_mm256_slli_epi32(w.half[i], 16))}; });
}
inline Lanes odd_of(const Pairs& w) {
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return lanes_of(
        [&](int i) { return F{_mm256_castsi256_ps(_mm256_and_si256(w.half[i], high))}; });
}

// Sixteen E4M3 codes, one in each 16-bit word, to bf16.
inline __m256i fp8_words(__m256i code) {
    const __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi16(0x7f));
    const __m256i normal =
        _mm256_add_epi16(_mm256_slli_epi16(magnitude, 4), _mm256_set1_epi16(fp8_as_bf16(8) - 128));
    // Below 8 the codes are multiples of 2^-9.
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_setr_epi16(0, fp8_as_bf16(1), fp8_as_bf16(2), fp8_as_bf16(3), fp8_as_bf16(4),
                       fp8_as_bf16(5), fp8_as_bf16(6), fp8_as_bf16(7)));
    const __m256i both = _mm256_or_si256(magnitude, _mm256_slli_epi16(magnitude, 8));
    const __m256i index = _mm256_add_epi16(_mm256_add_epi16(both, both), _mm256_set1_epi16(0x100));
    const __m256i small = _mm256_shuffle_epi8(table, index);
    const __m256i is_small = _mm256_cmpgt_epi16(_mm256_set1_epi16(8), magnitude);
    const __m256i is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(code, _mm256_set1_epi16(0x80)), 8);
    const __m256i quiet = _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7fc0));
    return _mm256_or_si256(_mm256_or_si256(_mm256_blendv_epi8(normal, small, is_small), sign),
                           quiet);
}
struct Fp8Pairs {
    Pairs first, second;  // k = 0, 1 and 2, 3
};
inline Fp8Pairs decode_fp8(const uint8_t* line) {
    Fp8Pairs r;
    for (int i = 0; i < 2; ++i) {
        const __m256i codes = load_half(line, i), none = _mm256_setzero_si256();
        r.first.half[i] = fp8_words(_mm256_unpacklo_epi8(codes, none));
        r.second.half[i] = fp8_words(_mm256_unpackhi_epi8(codes, none));
    }
    return r;
}
inline void store_pairs(void* line, const Pairs& w) {
    for (int i = 0; i < 2; ++i) _mm256_storeu_si256(static_cast<__m256i*>(line) + i, w.half[i]);
}

// W whole numbers in [-127, 127].
inline void store_codes(int8_t* p, F x) {
    const __m256i whole = _mm256_cvtps_epi32(x.v);
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
