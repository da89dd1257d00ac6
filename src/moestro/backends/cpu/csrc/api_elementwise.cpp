// Checks and launches the element-wise ops.
#include <cstring>

#include "api.h"

namespace moestro {

Status launch_rms_norm(const void* args) {
    const auto& a = *static_cast<const NormArgs*>(args);
    const Status bad = check_dtypes(a.dtype, a.weight_dtype);
    if (bad != kOk || a.rows == 0 || a.size == 0) return bad;
    kernels().elementwise.rms_norm(a);
    return kOk;
}

Status launch_silu_and_mul(const void* args) {
    const auto& a = *static_cast<const ActivationArgs*>(args);
    const Status bad = check_dtypes(a.dtype, a.dtype);
    if (bad != kOk || a.rows == 0 || a.size == 0) return bad;
    kernels().elementwise.silu_and_mul(a);
    return kOk;
}

Status launch_qk_norm_rope(const void* args) {
    const auto& a = *static_cast<const RopeArgs*>(args);
    const Status bad = check_dtypes(a.dtype, a.weight_dtype);
    if (bad != kOk) return bad;
    if (a.head_dim < 2 || a.head_dim % 2 != 0)
        return fail(kBadShape, "head_dim is %lld; rotary pairs need an even one", (ll)a.head_dim);
    if (a.num_tokens > 0) kernels().elementwise.qk_norm_rope(a);
    return kOk;
}

Status launch_store_kv(const void* args) {
    const auto& a = *static_cast<const StoreKvArgs*>(args);
    const Status bad = check_dtypes(a.dtype, a.page_dtype);
    if (bad != kOk) return bad;
    const int64_t slots = a.num_pages * a.page_size;
    for (int64_t t = 0; t < a.num_tokens; ++t)
        if (a.slots[t] < -1 || a.slots[t] >= slots)
            return fail(kOutOfRange, "slot_mapping[%lld] is %lld; slots are -1 (skip) to %lld",
                        (ll)t, (ll)a.slots[t], (ll)slots - 1);
    if (a.num_tokens > 0) kernels().elementwise.store_kv(a);
    return kOk;
}

Status launch_embedding(const void* args) {
    const auto& a = *static_cast<const EmbeddingArgs*>(args);
    for (int64_t t = 0; t < a.num_tokens; ++t)
        if (a.ids[t] < 0 || a.ids[t] >= a.vocab_size)
            return fail(kOutOfRange, "input_ids[%lld] is %lld; the vocabulary is 0 to %lld", (ll)t,
                        (ll)a.ids[t], (ll)a.vocab_size - 1);
    for (int64_t t = 0; t < a.num_tokens; ++t)
        std::memcpy(static_cast<char*>(a.out) + t * a.row_bytes,
                    static_cast<const char*>(a.weight) + a.ids[t] * a.row_bytes,
                    static_cast<size_t>(a.row_bytes));
    return kOk;
}

}  // namespace moestro
