// Checks and launches the router and the choice of experts.
#include "api.h"

namespace moestro {
namespace {

Status check_choice(int64_t num_experts, int64_t top_k) {
    if (num_experts < 1 || num_experts > kMaxExperts)
        return fail(kBadShape, "%lld experts; this kernel takes 1 to %lld", (ll)num_experts,
                    (ll)kMaxExperts);
    if (top_k < 1 || top_k > num_experts)
        return fail(kBadShape, "top_k is %lld of %lld experts", (ll)top_k, (ll)num_experts);
    return kOk;
}

}  // namespace

Status launch_moe_gating_top_k(const void* args) {
    const auto& a = *static_cast<const GatingArgs*>(args);
    const Status bad = check_choice(a.num_experts, a.top_k);
    if (bad != kOk) return bad;
    if (a.num_tokens > 0) kernels().routing.moe_gating_top_k(a);
    return kOk;
}

Status launch_moe_router(const void* args) {
    const auto& a = *static_cast<const RouterArgs*>(args);
    const Status bad = check_choice(a.num_experts, a.topk_ids == nullptr ? 1 : a.top_k);
    if (bad != kOk) return bad;
    if (!known(a.x_dtype)) return fail(kBadDtype, "unknown dtype code %d", a.x_dtype);
    if (a.terms < 0 || a.terms > 2 || (a.terms > 0 && a.x_dtype != kBF16))
        return fail(kBadDtype, "router weights of %d bf16 terms for dtype code %d", a.terms,
                    a.x_dtype);
    if (a.hidden < 1) return fail(kBadShape, "hidden size %lld", (ll)a.hidden);
    if (a.num_tokens <= 0) return kOk;
    const Status status = kernels().routing.moe_router(a);
    if (status == kNoMemory) return fail(status, "no memory for the router's logits");
    return status;
}

}  // namespace moestro
