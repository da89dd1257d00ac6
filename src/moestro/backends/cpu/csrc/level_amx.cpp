// Kernels for the amx level; the build compiles this file with that level's flags.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "thread_pool.h"
#include "types.h"

#if defined(__AVX512F__) && defined(__AVX512BF16__) && defined(__AMX_BF16__)

namespace moestro {
namespace amx {
namespace {

#include "vec_avx512.h"

struct FastBf16 {  // by tiles: amx.inl
    using TX = bf16;
    using TW = bf16;
};

// clang-format off: the order matters
#include "math.inl"
#include "elementwise.inl"
#include "gemm.inl"
#include "amx.inl"
#include "linear.inl"
#include "moe.inl"
#include "attention.inl"
#include "attention_f32.inl"
#include "attention_amx.inl"
// clang-format on

Status paged_attention(const AttentionArgs& a) {
    const bool tiles = a.q_dtype == kBF16 && a.kv_dtype == kBF16;
    return tiles ? attend<TileAttention>(a) : attend<Attention>(a);
}

const Kernels kKernels = {"amx",  rms_norm,         silu_and_mul, qk_norm_rope,   store_kv,
                          linear, moe_gating_top_k, moe_experts,  paged_attention};

}  // namespace
}  // namespace amx

const Kernels* amx_kernels() { return &amx::kKernels; }

}  // namespace moestro

#else

namespace moestro {
const Kernels* amx_kernels() { return nullptr; }
}  // namespace moestro

#endif
