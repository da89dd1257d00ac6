// Kernels for the avx2 level; the build compiles this file with that level's flags.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "thread_pool.h"
#include "types.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

namespace moestro {
namespace avx2 {
namespace {

#include "vec_avx2.h"

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

const Kernels kKernels = {"avx2", rms_norm,         silu_and_mul, qk_norm_rope,   store_kv,
                          linear, moe_gating_top_k, moe_experts,  paged_attention};

}  // namespace
}  // namespace avx2

const Kernels* avx2_kernels() { return &avx2::kKernels; }

}  // namespace moestro

#else

namespace moestro {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace moestro

#endif
