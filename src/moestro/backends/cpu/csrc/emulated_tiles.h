// The tile unit (AMX) in plain AVX-512, for tests of the amx kernels on machines without it. Only
// the level amx-emulated, which no package holds, includes this.
//
// Tiles and their shapes are a thread's own. Products follow the instructions' definition (Intel
// SDM, TDPBF16PS and TDPBSSD): bf16 products of even and odd k are summed apart by fused
// multiply-adds, rounded to nearest even, denormals taken and given as zero, and their sum is added
// to the tile; int8 products are exact and wrap at 32 bits. What the processor would refuse ends
// the process with a message.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace moestro::emulated {
namespace {

struct Tiles {
    bool configured = false;
    uint16_t row_bytes[8] = {};
    uint8_t rows[8] = {};
    alignas(64) uint8_t data[8][16][64] = {};
};

thread_local Tiles t_tiles;

[[noreturn]] inline void refuse(const char* what, int tile) {
    std::fprintf(stderr, "emulated tile unit: %s (tile %d)\n", what, tile);
    std::abort();
}

inline Tiles& checked(int tile) {
    Tiles& t = t_tiles;
    if (!t.configured) refuse("used without a configuration", tile);
    if (tile < 0 || tile > 7 || t.rows[tile] == 0) refuse("a tile without a shape", tile);
    return t;
}

inline void load_config(const void* config) {
    const auto* bytes = static_cast<const uint8_t*>(config);
    Tiles& t = t_tiles;
    t = Tiles();
    if (bytes[0] != 1) refuse("palette is not 1", -1);
    for (int i = 2; i < 16; ++i)
        if (bytes[i] != 0) refuse("reserved bytes are not 0", -1);
    for (int i = 0; i < 8; ++i) {
        std::memcpy(&t.row_bytes[i], bytes + 16 + 2 * i, 2);
        t.rows[i] = bytes[48 + i];
        if (t.rows[i] > 16 || t.row_bytes[i] > 64) refuse("a tile larger than 16 x 64", i);
        if ((t.rows[i] == 0) != (t.row_bytes[i] == 0)) refuse("rows without bytes, or bytes", i);
    }
    t.configured = true;
}

inline void release() { t_tiles.configured = false; }

inline void zero_tile(int tile) { std::memset(checked(tile).data[tile], 0, 1024); }

inline void load_tile(int tile, const void* base, int64_t stride) {
    Tiles& t = checked(tile);
    std::memset(t.data[tile], 0, 1024);
    for (int r = 0; r < t.rows[tile]; ++r)
        std::memcpy(t.data[tile][r], static_cast<const char*>(base) + r * stride,
                    t.row_bytes[tile]);
}

inline void store_tile(int tile, void* base, int64_t stride) {
    const Tiles& t = checked(tile);
    for (int r = 0; r < t.rows[tile]; ++r)
        std::memcpy(static_cast<char*>(base) + r * stride, t.data[tile][r], t.row_bytes[tile]);
}

inline void check_product(const Tiles& t, int sum, int a, int b) {
    checked(sum), checked(a), checked(b);
    if (sum == a || sum == b || a == b) refuse("a tile named twice in a product", sum);
    if (t.rows[sum] != t.rows[a]) refuse("sum and first operand differ in rows", sum);
    if (t.row_bytes[sum] != t.row_bytes[b]) refuse("sum and second operand differ in width", sum);
    if (t.row_bytes[a] != 4 * t.rows[b]) refuse("operands differ in depth", a);
    if (t.row_bytes[sum] % 4 != 0) refuse("a width that is no multiple of 4", sum);
}

inline void product_bf16(int sum, int a, int b) {
    Tiles& t = t_tiles;
    check_product(t, sum, a, b);
    constexpr unsigned kFlush = 0x8040, kRound = 0x6000, kMasks = 0x1f80;
    const unsigned before = _mm_getcsr();
    _mm_setcsr(((before | kFlush) & ~kRound) | kMasks);
    asm volatile("" : : : "memory");
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    for (int m = 0; m < t.rows[sum]; ++m) {
        __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
        for (int k = 0; k < t.rows[b]; ++k) {
            uint32_t pair;
            std::memcpy(&pair, t.data[a][m] + 4 * k, 4);
            const __m512i x = _mm512_set1_epi32(static_cast<int>(pair));
            const __m512i y = _mm512_load_si512(t.data[b][k]);
            even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                                   _mm512_castsi512_ps(_mm512_slli_epi32(y, 16)), even);
            odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(x, upper)),
                                  _mm512_castsi512_ps(_mm512_and_si512(y, upper)), odd);
        }
        const __m512 here = _mm512_load_ps(t.data[sum][m]);
        const __mmask64 some = ~uint64_t{0} >> (64 - t.row_bytes[sum]);
        const __m512i all = _mm512_castps_si512(_mm512_add_ps(here, _mm512_add_ps(even, odd)));
        _mm512_store_si512(t.data[sum][m], _mm512_maskz_mov_epi8(some, all));
    }
    asm volatile("" : : : "memory");
    _mm_setcsr(before);
}

// The even bytes of 16-bit lanes (odd: the other ones) as 16-bit numbers.
template <class T>
inline __m512i widened(__m512i bytes, bool odd) {
    const __m512i top = odd ? bytes : _mm512_slli_epi16(bytes, 8);
    return T(-1) < T(0) ? _mm512_srai_epi16(top, 8) : _mm512_srli_epi16(top, 8);
}

template <class A, class B>
inline void product_int8(int sum, int a, int b) {
    Tiles& t = t_tiles;
    check_product(t, sum, a, b);
    const __mmask64 some = ~uint64_t{0} >> (64 - t.row_bytes[sum]);
    for (int m = 0; m < t.rows[sum]; ++m) {
        __m512i total = _mm512_load_si512(t.data[sum][m]);
        for (int k = 0; k < t.rows[b]; ++k) {
            uint32_t four;
            std::memcpy(&four, t.data[a][m] + 4 * k, 4);
            const __m512i x = _mm512_set1_epi32(static_cast<int>(four));
            const __m512i y = _mm512_load_si512(t.data[b][k]);
            // Pairs of 16-bit products, which wrap.
            total = _mm512_dpwssd_epi32(total, widened<A>(x, false), widened<B>(y, false));
            total = _mm512_dpwssd_epi32(total, widened<A>(x, true), widened<B>(y, true));
        }
        _mm512_store_si512(t.data[sum][m], _mm512_maskz_mov_epi8(some, total));
    }
}

}  // namespace
}  // namespace moestro::emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#undef _tile_dpbuud
#define _tile_loadconfig(config) ::moestro::emulated::load_config(config)
#define _tile_release() ::moestro::emulated::release()
#define _tile_zero(tile) ::moestro::emulated::zero_tile(tile)
#define _tile_loadd(tile, base, stride) ::moestro::emulated::load_tile(tile, base, stride)
#define _tile_stream_loadd(tile, base, stride) ::moestro::emulated::load_tile(tile, base, stride)
#define _tile_stored(tile, base, stride) ::moestro::emulated::store_tile(tile, base, stride)
#define _tile_dpbf16ps(sum, a, b) ::moestro::emulated::product_bf16(sum, a, b)
#define _tile_dpbssd(sum, a, b) ::moestro::emulated::product_int8<int8_t, int8_t>(sum, a, b)
#define _tile_dpbsud(sum, a, b) ::moestro::emulated::product_int8<int8_t, uint8_t>(sum, a, b)
#define _tile_dpbusd(sum, a, b) ::moestro::emulated::product_int8<uint8_t, int8_t>(sum, a, b)
#define _tile_dpbuud(sum, a, b) ::moestro::emulated::product_int8<uint8_t, uint8_t>(sum, a, b)
