// Lines of packed weights times broadcast activations: AVX-512 with VNNI, BF16, VBMI.

constexpr bool kDotsBf16 = true;  // bf16 activations are multiplied as they are

struct Sums {
    __m512i v;
};
inline Sums all_sums(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Lanes to_lanes(Sums a) { return {{{_mm512_cvtepi32_ps(a.v)}}}; }
inline Sums times_zeros(const uint8_t* zeros, int32_t x) {
    const __m128i z = _mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros));
    return {_mm512_mullo_epi32(_mm512_cvtepu8_epi32(z), _mm512_set1_epi32(x))};
}

inline Lanes fused(const Lanes& a, const Lanes& b, const Lanes& c) { return fma(a, b, c); }

using Codes = __m512i;   // unsigned weights, 16 rows x 4 k
using Signed = __m512i;  // 4 k of one row of activations, in every lane
inline Codes load_codes(const uint8_t* line) { return _mm512_loadu_si512(line); }
inline Codes low_codes(Codes line) { return _mm512_and_si512(line, _mm512_set1_epi8(15)); }
inline Codes high_codes(Codes line) {
    return _mm512_and_si512(_mm512_srli_epi16(line, 4), _mm512_set1_epi8(15));
}
inline Signed spread_signed(const int8_t* x) {
    int32_t word;
    __builtin_memcpy(&word, x, 4);
    return _mm512_set1_epi32(word);
}
// As assembly: gcc 12 copies the accumulators of the intrinsic through memory in a large tile.
inline Sums dot_codes(Sums a, Codes w, Signed x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(a.v) : "v"(w), "v"(x));
    return a;
}
inline Sums dot_nibbles(Sums a, Codes w, Signed x) { return dot_codes(a, w, x); }

using Pairs = __m512i;  // bf16 weights, 16 rows x 2 k
inline Pairs load_pairs(const void* line) { return _mm512_loadu_si512(line); }
inline Lanes even_of(Pairs w) { return {{{_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))}}}; }
inline Lanes odd_of(Pairs w) {
    return {{{_mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(int32_t(0xffff0000u))))}}};
}
inline Pairs spread_pair(const bf16* x) {
    int32_t word;
    __builtin_memcpy(&word, x, 4);
    return _mm512_set1_epi32(word);
}
inline Lanes dot_pairs(const Lanes& a, Pairs w, Pairs x) {
    return {{{_mm512_dpbf16_ps(a.part[0].v, (__m512bh)w, (__m512bh)x)}}};
}

// The upper and lower bytes of the bf16 numbers that E4M3 codes 0..127 stand for.
struct alignas(64) Fp8Bytes {
    uint8_t high[128], low[128];
    constexpr Fp8Bytes() : high(), low() {
        for (int code = 0; code < 128; ++code) {
            const int bits = fp8_as_bf16(code);
            high[code] = static_cast<uint8_t>(bits >> 8);
            low[code] = static_cast<uint8_t>(bits & 0xff);
        }
    }
};
constexpr Fp8Bytes kFp8Bytes;

struct Fp8Pairs {
    Pairs first, second;  // k = 0, 1 and 2, 3
};
inline Fp8Pairs decode_fp8(const uint8_t* line) {
    const __m512i code = _mm512_loadu_si512(line);
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(kFp8Bytes.low), code,
                                                 _mm512_load_si512(kFp8Bytes.low + 64));
    const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(kFp8Bytes.high), code,
                                                  _mm512_load_si512(kFp8Bytes.high + 64));
    // high | (code & 0x80)
    const __m512i top = _mm512_ternarylogic_epi32(high, code, _mm512_set1_epi8(-128), 0xf8);
    return {_mm512_unpacklo_epi8(low, top), _mm512_unpackhi_epi8(low, top)};
}
inline void store_pairs(void* line, Pairs w) { _mm512_storeu_si512(line, w); }

// W whole numbers in [-127, 127].
inline void store_codes(int8_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.v)));
}
