// Choosing experts.
#include "level.h"

namespace moestro::MOESTRO_LEVEL {
namespace {
#include "gating.inl"
}  // namespace

RoutingKernels routing_kernels() { return {moe_gating_top_k}; }

}  // namespace moestro::MOESTRO_LEVEL
