// Matrix products: linear layers and experts.
#include "level.h"

namespace moestro::MOESTRO_LEVEL {
namespace {

#if defined(MOESTRO_LEVEL_AMX)
struct FastBf16 {  // by tiles: amx.inl
    using TX = bf16;
    using TW = bf16;
};
#else
using FastBf16 = DotBf16;
#endif

// clang-format off: the order matters
#include "gemm.inl"
#if defined(MOESTRO_LEVEL_AMX)
#include "tiles.inl"
#include "amx.inl"
#endif
#include "linear.inl"
#include "moe.inl"
// clang-format on

}  // namespace

MatmulKernels matmul_kernels() { return {linear, moe_experts}; }

}  // namespace moestro::MOESTRO_LEVEL
