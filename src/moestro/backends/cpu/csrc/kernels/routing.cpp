// Choosing experts.
#include <cstring>

#include "level.h"

namespace moestro::MOESTRO_LEVEL {
namespace {
#include "gating.inl"
#include "router.inl"
}  // namespace

RoutingKernels routing_kernels() { return {moe_gating_top_k, moe_router}; }

}  // namespace moestro::MOESTRO_LEVEL
