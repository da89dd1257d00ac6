// Kernels for the avx512 level; the build compiles this file with that level's flags.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "thread_pool.h"
#include "types.h"

#if defined(__AVX512F__) && defined(__AVX512BF16__)

namespace moestro {
namespace avx512 {
namespace {

#include "vec_avx512.h"

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

const Kernels kKernels = {"avx512", rms_norm,         silu_and_mul, qk_norm_rope,   store_kv,
                          linear,   moe_gating_top_k, moe_experts,  paged_attention};

}  // namespace
}  // namespace avx512

const Kernels* avx512_kernels() { return &avx512::kKernels; }

}  // namespace moestro

#else

namespace moestro {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace moestro

#endif
