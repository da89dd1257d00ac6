// Checks and launches matrix products.
#include "api.h"

namespace moestro {
namespace {

Status check_ids(const int32_t* ids, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; ++i)
        if (ids[i] < 0 || ids[i] >= limit)
            return fail(kOutOfRange, "topk_ids[%lld] is %d; experts are 0 to %lld", (ll)i, ids[i],
                        (ll)limit - 1);
    return kOk;
}

}  // namespace

Status launch_linear(const void* args) {
    const auto& a = *static_cast<const LinearArgs*>(args);
    Status bad = check_pair(a.x_dtype, a.weight_dtype);
    if (bad == kOk) bad = check_dtypes(a.out_dtype, a.out_dtype);
    if (bad != kOk) return bad;
    if (a.in_features < 1) return fail(kBadShape, "in_features is %lld", (ll)a.in_features);
    if (a.num_tokens == 0 || a.out_features == 0) return kOk;
    const Status status = kernels().matmul.linear(a);
    return status == kNoMemory ? fail(status, "no memory for the product's scratch") : status;
}

Status launch_moe_experts(const void* args) {
    const auto& a = *static_cast<const MoeArgs*>(args);
    const Status bad = check_pair(a.x_dtype, a.weight_dtype);
    if (bad != kOk) return bad;
    if (a.hidden < 1 || a.intermediate < 1 || a.top_k < 1 ||
        (a.shared_down != nullptr && a.shared_intermediate < 1))
        return fail(kBadShape, "a size of moe_experts is not positive");
    if (a.num_tokens > (int64_t{1} << 31) / a.top_k - 1)
        return fail(kBadShape, "%lld tokens are too many for one call", (ll)a.num_tokens);
    const Status out = check_ids(a.topk_ids, a.num_tokens * a.top_k, a.num_experts);
    if (out != kOk) return out;
    if (a.num_tokens == 0) return kOk;
    const Status status = kernels().matmul.moe_experts(a);
    return status == kNoMemory ? fail(status, "no memory for the experts' scratch") : status;
}

}  // namespace moestro
