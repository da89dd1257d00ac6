// Kernels for the portable level; the build compiles this file with that level's flags.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "thread_pool.h"
#include "types.h"

namespace moestro {
namespace portable {
namespace {

#include "vec_portable.h"

using FastBf16 = DotBf16;

// clang-format off: the order matters
#include "math.inl"
#include "elementwise.inl"
#include "gemm.inl"
#include "linear.inl"
#include "moe.inl"
#include "attention.inl"
#include "attention_f32.inl"
// clang-format on

Status paged_attention(const AttentionArgs& a) { return attend<Attention>(a); }

const Kernels kKernels = {"portable", rms_norm,         silu_and_mul, qk_norm_rope,   store_kv,
                          linear,     moe_gating_top_k, moe_experts,  paged_attention};

}  // namespace
}  // namespace portable

const Kernels* portable_kernels() { return &portable::kKernels; }

}  // namespace moestro
