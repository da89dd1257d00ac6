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

Status launch_mtp_input(const void* args) {
    const auto& a = *static_cast<const MtpInputArgs*>(args);
    const Status bad = check_dtypes(a.dtype, a.weight_dtype);
    if (bad != kOk || a.rows == 0 || a.size == 0) return bad;
    kernels().elementwise.mtp_input(a);
    return kOk;
}

Status launch_silu_and_mul(const void* args) {
    const auto& a = *static_cast<const ActivationArgs*>(args);
    const Status bad = check_dtypes(a.dtype, a.dtype);
    if (bad != kOk || a.rows == 0 || a.size == 0) return bad;
    kernels().elementwise.silu_and_mul(a);
    return kOk;
}

Status check_pages(const KvPages& pages) {
    const bool codes = pages.dtype == kKvInt8 || pages.dtype == kKvFp8;
    if (!codes && !known(pages.dtype))
        return fail(kBadDtype, "pages have unknown dtype code %d", pages.dtype);
    if (codes != (pages.k_scales != nullptr) || codes != (pages.v_scales != nullptr))
        return fail(kBadDtype, "int8 and fp8 pages have scales, others have none");
    if (pages.page_size < 1) return fail(kBadShape, "page_size is %lld", (ll)pages.page_size);
    return kOk;
}

namespace {

Status check_rotation(int64_t head_dim, int64_t rotary_dim) {
    if (rotary_dim >= 2 && rotary_dim % 2 == 0 && rotary_dim <= head_dim) return kOk;
    return fail(kBadShape, "%lld of %lld elements are rotated; it takes an even number of them",
                (ll)rotary_dim, (ll)head_dim);
}

Status check_slots(const int64_t* slots, int64_t num_tokens, const KvPages& pages) {
    const int64_t count = pages.num_pages * pages.page_size;
    for (int64_t t = 0; t < num_tokens; ++t)
        if (slots[t] < -1 || slots[t] >= count)
            return fail(kOutOfRange, "slot_mapping[%lld] is %lld; slots are -1 (skip) to %lld",
                        (ll)t, (ll)slots[t], (ll)count - 1);
    return kOk;
}

}  // namespace

Status launch_qk_norm_rope(const void* args) {
    const auto& a = *static_cast<const RopeArgs*>(args);
    Status bad = check_dtypes(a.dtype, a.weight_dtype);
    if (bad == kOk) bad = check_rotation(a.head_dim, a.rotary_dim);
    if (bad == kOk && a.num_tokens > 0) kernels().elementwise.qk_norm_rope(a);
    return bad;
}

Status launch_store_kv(const void* args) {
    const auto& a = *static_cast<const StoreKvArgs*>(args);
    Status bad = check_dtypes(a.dtype, a.dtype);
    if (bad == kOk) bad = check_pages(a.pages);
    if (bad == kOk) bad = check_slots(a.slots, a.num_tokens, a.pages);
    if (bad == kOk && a.num_tokens > 0) kernels().elementwise.store_kv(a);
    return bad;
}

Status launch_qk_norm_rope_store(const void* args) {
    const auto& a = *static_cast<const RopeStoreArgs*>(args);
    Status bad = check_dtypes(a.dtype, a.weight_dtype);
    if (bad == kOk) bad = check_rotation(a.head_dim, a.rotary_dim);
    if (bad == kOk) bad = check_pages(a.pages);
    if (bad == kOk) bad = check_slots(a.slots, a.num_tokens, a.pages);
    if (bad != kOk) return bad;
    if (a.head_dim > kMaxHeadDim)
        return fail(kBadShape, "head_dim is %lld; this kernel takes up to %lld", (ll)a.head_dim,
                    (ll)kMaxHeadDim);
    if (a.hadamard && (a.head_dim & (a.head_dim - 1)) != 0)
        return fail(kBadShape, "a Hadamard rotation needs a power of two, head_dim is %lld",
                    (ll)a.head_dim);
    for (int64_t t = 0; t < a.num_tokens; ++t)
        if (a.positions[t] < 0 || a.positions[t] >= a.num_positions)
            return fail(kOutOfRange, "positions[%lld] is %lld; the rotary table has 0 to %lld",
                        (ll)t, (ll)a.positions[t], (ll)a.num_positions - 1);
    if (a.num_tokens > 0) kernels().elementwise.qk_norm_rope_store(a);
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
