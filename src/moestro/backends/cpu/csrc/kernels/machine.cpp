// What the processor can do at best at this level: instructions on registers alone, and reading.
#include "level.h"

namespace moestro::MOESTRO_LEVEL {
namespace {

#if defined(MOESTRO_LEVEL_AMX)
#include "tiles.inl"
#endif

// As many independent sums as hide the latency of a multiply-add and still fit the registers.
constexpr int kSums = W == 16 ? 24 : 12;

// Keeps the compiler from knowing, and so from simplifying, a value.
template <class T>
inline T hidden(T x) {
    asm volatile("" : "+m"(x));
    return x;
}

// sums[i] = step(sums[i]) for all i, `rounds` times. The loops over i are unrolled so that the sums
// stay in registers; they begin with what may be different values, so that each is computed.
template <class V, class Step>
inline void repeat(int64_t rounds, V start, V* sums, const Step& step) {
    V in[kSums];
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) in[i] = hidden(start);
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
        for (int i = 0; i < kSums; ++i) in[i] = step(in[i]);
    }
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) sums[i] = in[i];
}

#if defined(MOESTRO_LEVEL_PORTABLE)
// Vectors wider than the registers would be kept in memory.
typedef float Register __attribute__((vector_size(16)));
inline Register multiply_add(Register sum, Register x, Register y) { return sum * x + y; }
inline Register spread(float x) { return Register{x, x, x, x}; }
inline float first_of(Register x) { return x[0]; }
#else
using Register = F;
inline F multiply_add(F sum, F x, F y) { return fma(sum, x, y); }
inline F spread(float x) { return set1(x); }
inline float first_of(F x) { return hsum(x); }
#endif

float fp32(int64_t rounds) {
    const Register x = spread(hidden(0.999f)), y = spread(hidden(0.001f));
    Register sums[kSums];
    repeat(rounds, y, sums, [=](Register sum) { return multiply_add(sum, x, y); });
    for (int i = 1; i < kSums; ++i) sums[0] = sums[0] + sums[i];
    return first_of(sums[0]);
}
constexpr int64_t kFp32 = int64_t{2} * kSums * (sizeof(Register) / sizeof(float));

// The sum of a stretch of floats: one load of a vector and one addition for each.
float read(const float* data, int64_t count) {
    F a = zero(), b = zero(), c = zero(), d = zero();
    for (const float* end = data + count / (4 * W) * (4 * W); data < end; data += 4 * W) {
        a = a + load(data);
        b = b + load(data + W);
        c = c + load(data + 2 * W);
        d = d + load(data + 3 * W);
    }
    return hsum((a + b) + (c + d));
}

#if defined(MOESTRO_LEVEL_AMX)

// Four sums, as the kernels have them: two tiles of one operand by two of the other. tile: 1 KiB.
void start_tiles(void* tile) {
    make_visible(tile);
    configure_tiles(16, 16, 16, 16);
    _tile_loadd(4, tile, 64);
    _tile_loadd(5, tile, 64);
    _tile_loadd(6, tile, 64);
    _tile_loadd(7, tile, 64);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

void end_tiles(void* tile) {
    _tile_stored(3, tile, 64);
    _tile_release();
    make_visible(tile);
}

float bf16_tiles(int64_t rounds) {
    alignas(64) float tile[256] = {};
    start_tiles(tile);
    for (int64_t i = 0; i < rounds; ++i) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    end_tiles(tile);
    return tile[0];
}

float int8_tiles(int64_t rounds) {
    alignas(64) int32_t tile[256] = {};
    start_tiles(tile);
    for (int64_t i = 0; i < rounds; ++i) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    end_tiles(tile);
    return static_cast<float>(tile[0]);
}

constexpr Peak kBf16 = {bf16_tiles, int64_t{4} * 2 * 16 * 16 * 32};
constexpr Peak kInt8 = {int8_tiles, int64_t{4} * 2 * 16 * 16 * 64};

#elif defined(MOESTRO_LEVEL_AVX512)

float bf16_dots(int64_t rounds) {
    const __m512i x = _mm512_set1_epi32(hidden(0x3c003c01)), y = _mm512_set1_epi32(hidden(0x3c02));
    F sums[kSums];
    repeat(rounds, zero(), sums,
           [=](F sum) { return F{_mm512_dpbf16_ps(sum.v, (__m512bh)x, (__m512bh)y)}; });
    for (int i = 1; i < kSums; ++i) sums[0] = sums[0] + sums[i];
    return hsum(sums[0]);
}

struct I {
    __m512i v;
};

float int8_dots(int64_t rounds) {
    const __m512i x = _mm512_set1_epi32(hidden(0x01020304)), y = _mm512_set1_epi32(hidden(-5));
    I sums[kSums];
    repeat(rounds, I{_mm512_setzero_si512()}, sums,
           [=](I sum) { return I{_mm512_dpbusd_epi32(sum.v, x, y)}; });
    __m512i sum = sums[0].v;
    for (int i = 1; i < kSums; ++i) sum = _mm512_add_epi32(sum, sums[i].v);
    return static_cast<float>(_mm512_reduce_add_epi32(sum));
}

constexpr Peak kBf16 = {bf16_dots, int64_t{2} * 32 * kSums};
constexpr Peak kInt8 = {int8_dots, int64_t{2} * 64 * kSums};

#else  // no instruction of its own multiplies these

constexpr Peak kBf16 = {nullptr, 0};
constexpr Peak kInt8 = {nullptr, 0};

#endif

}  // namespace

MachineKernels machine_kernels() { return {{{fp32, kFp32}, kBf16, kInt8}, read}; }

}  // namespace moestro::MOESTRO_LEVEL
