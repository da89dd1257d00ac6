// Paged attention.
#include "attention_plan.h"
#include "level.h"

namespace moestro::MOESTRO_LEVEL {
namespace {

// clang-format off: the order matters
#include "kv_rows.inl"
#include "attention.inl"
#include "attention_f32.inl"
#if defined(MOESTRO_LEVEL_AVX512) || defined(MOESTRO_LEVEL_AMX)
#include "attention_few.inl"
#include "attention_dot.inl"
#endif
#if defined(MOESTRO_LEVEL_AMX)
#include "tiles.inl"
#include "attention_amx.inl"
#endif
// clang-format on

Status paged_attention(const AttentionArgs& a) {
#if defined(MOESTRO_LEVEL_AMX)
    if (a.q_dtype == kBF16 && a.pages.dtype == kBF16) return attend<TileAttention>(a);
#endif
#if defined(MOESTRO_LEVEL_AVX512) || defined(MOESTRO_LEVEL_AMX)
    if (a.q_dtype == kBF16 && a.pages.dtype == kBF16) return attend<DotAttention<bf16>>(a);
    if (a.q_dtype == kBF16 && a.pages.dtype == kKvInt8) return attend<DotAttention<Int8Code>>(a);
    if (a.q_dtype == kBF16 && a.pages.dtype == kKvFp8) return attend<DotAttention<Fp8Code>>(a);
#endif
    return attend<Attention>(a);
}

}  // namespace

AttentionKernels attention_kernels() { return {paged_attention}; }

}  // namespace moestro::MOESTRO_LEVEL
