// Norms, activation, rotary embedding and the KV write.
#include "level.h"

namespace moestro::MOESTRO_LEVEL {
namespace {
#include "elementwise.inl"
}  // namespace

ElementwiseKernels elementwise_kernels() {
    return {rms_norm, silu_and_mul, qk_norm_rope, store_kv};
}

}  // namespace moestro::MOESTRO_LEVEL
