// Matrix products: linear layers and experts.
#include "level.h"
#include "packed.h"

namespace moestro::MOESTRO_LEVEL {
namespace {

constexpr int64_t kAhead = 2048;  // bytes of weights asked for ahead, by the first to read them

// The bf16 bits of an E4M3 code without its sign bit.
constexpr int fp8_as_bf16(int code) {
    const int exponent = code >> 3, mantissa = code & 7;
    if (code == 0x7f) return 0x7fc0;
    if (exponent > 0) return (exponent + 120) << 7 | mantissa << 4;
    if (mantissa >= 4) return 120 << 7 | (mantissa - 4) << 5;
    if (mantissa >= 2) return 119 << 7 | (mantissa - 2) << 6;
    return mantissa == 1 ? 118 << 7 : 0;
}

// clang-format off: the order matters
#include "lanes.inl"
#if defined(MOESTRO_LEVEL_AVX512) || defined(MOESTRO_LEVEL_AMX)
#include "dots_avx512.inl"
#elif defined(MOESTRO_LEVEL_AVX2)
#include "dots_avx2.inl"
#else
#include "dots_portable.inl"
#endif
#include "tile.inl"
#include "panel.inl"
#if defined(MOESTRO_LEVEL_AMX)
#include "tiles.inl"
#include "matmul_amx.inl"
#endif
#include "rows_of_x.inl"
#include "linear.inl"
#include "moe.inl"
// clang-format on

}  // namespace

MatmulKernels matmul_kernels() { return {linear, moe_experts}; }

}  // namespace moestro::MOESTRO_LEVEL
