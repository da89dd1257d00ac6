// Checks and launches the choice of experts.
#include "api.h"

namespace moestro {

Status launch_moe_gating_top_k(const void* args) {
    const auto& a = *static_cast<const GatingArgs*>(args);
    if (a.num_experts < 1 || a.num_experts > kMaxExperts)
        return fail(kBadShape, "%lld experts; this kernel takes 1 to %lld", (ll)a.num_experts,
                    (ll)kMaxExperts);
    if (a.top_k < 1 || a.top_k > a.num_experts)
        return fail(kBadShape, "top_k is %lld of %lld experts", (ll)a.top_k, (ll)a.num_experts);
    if (a.num_tokens > 0) kernels().routing.moe_gating_top_k(a);
    return kOk;
}

}  // namespace moestro
