// Norms, activation, rotary embedding and the KV write.
#include "level.h"

namespace moestro::MOESTRO_LEVEL {
namespace {
// clang-format off: the order matters
#include "kv_rows.inl"
#include "elementwise.inl"
// clang-format on
}  // namespace

ElementwiseKernels elementwise_kernels() {
    return {rms_norm, mtp_input, silu_and_mul, qk_norm_rope, store_kv, qk_norm_rope_store};
}

}  // namespace moestro::MOESTRO_LEVEL
