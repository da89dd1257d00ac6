// Checks and launches matrix products, packing and unpacking.
#include <cstring>

#include "api.h"
#include "packed.h"
#include "packing.h"

namespace moestro {
namespace {

// An int8 product sums at most this many products of 127 * 127 in 32 bits.
constexpr int64_t kMaxInt8K = 65536;

Status check_ids(const int32_t* ids, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; ++i)
        if (ids[i] < 0 || ids[i] >= limit)
            return fail(kOutOfRange, "topk_ids[%lld] is %d; experts are 0 to %lld", (ll)i, ids[i],
                        (ll)limit - 1);
    return kOk;
}

Status check_group(const PackedWeight& w, const char* name) {
    const int64_t size = w.group_size, K = w.in_features;
    if (w.format == kW4A8 && (size < 8 || size % 8 != 0 || K % size != 0))
        return fail(kBadShape,
                    "%s: w4a8 groups of %lld do not fit %lld columns; a group is a multiple of 8 "
                    "that divides the columns",
                    name, (ll)size, (ll)K);
    if (w.format == kFP8 && (size < 0 || size % 4 != 0 || size > kBlockK))
        return fail(kBadShape,
                    "%s: fp8 groups of %lld; they are 0 (a row) or a multiple of 4 to %lld", name,
                    (ll)size, (ll)kBlockK);
    if (w.format != kW4A8 && w.format != kFP8 && size != 0)
        return fail(kBadShape, "%s: a format without groups has groups of %lld", name, (ll)size);
    if (w.format != kW4A8 && (w.flags & (kHasZeros | kFp32Scales)) != 0)
        return fail(kBadShape, "%s: only w4a8 has zeros, or a choice of scales", name);
    return kOk;
}

Status check_expert_shapes(const PackedWeight& gate_up, const PackedWeight& down, int64_t hidden,
                           int64_t experts, const char* name) {
    const bool right = gate_up.in_features == hidden && down.num_rows == hidden &&
                       gate_up.num_rows == 2 * down.in_features && gate_up.num_experts == experts &&
                       down.num_experts == experts;
    if (!right)
        return fail(kBadShape, "%s weights [%lld, %lld, %lld] and [%lld, %lld, %lld] do not match",
                    name, (ll)gate_up.num_experts, (ll)gate_up.num_rows, (ll)gate_up.in_features,
                    (ll)down.num_experts, (ll)down.num_rows, (ll)down.in_features);
    if ((gate_up.flags & kPaired) == 0 || (down.flags & kPaired) != 0)
        return fail(kBadShape, "%s gate and up rows must be packed as pairs, and no others", name);
    return kOk;
}

// Scales that are kept in 16 bits must have no more.
Status check_scales(const PackArgs& a, const PackedLayout& l) {
    if (l.groups() > 0 && a.scales == nullptr) return fail(kBadShape, "a weight without scales");
    if (l.has_zeros && a.zeros == nullptr) return fail(kBadShape, "a weight without zeros");
    if (l.scale_bytes() != 2) return kOk;
    for (int64_t i = 0; i < a.count * l.groups(); ++i) {
        uint32_t bits;
        std::memcpy(&bits, a.scales + i, 4);
        if ((bits & 0xffffu) != 0)
            return fail(kOutOfRange,
                        "scale %lld of row %lld is %.9g, which bfloat16 can't hold: pack it with "
                        "fp32 scales",
                        (ll)(i % l.groups()), (ll)(a.start + i / l.groups()),
                        static_cast<double>(a.scales[i]));
    }
    return kOk;
}

Status check_rows(const PackArgs& a) {
    const Status bad = check_weight(a.weight, "weight");
    if (bad != kOk) return bad;
    if (a.expert < 0 || a.expert >= a.weight.num_experts)
        return fail(kOutOfRange, "expert %lld; there are %lld", (ll)a.expert,
                    (ll)a.weight.num_experts);
    if (a.ids == nullptr && (a.start < 0 || a.count < 0 || a.start + a.count > a.weight.num_rows))
        return fail(kOutOfRange, "rows %lld to %lld; there are %lld", (ll)a.start,
                    (ll)(a.start + a.count), (ll)a.weight.num_rows);
    for (int64_t i = 0; a.ids != nullptr && i < a.count; ++i)
        if (a.ids[i] < 0 || a.ids[i] >= a.weight.num_rows)
            return fail(kOutOfRange, "input_ids[%lld] is %lld; the vocabulary is 0 to %lld", (ll)i,
                        (ll)a.ids[i], (ll)a.weight.num_rows - 1);
    return kOk;
}

}  // namespace

Status check_weight(const PackedWeight& w, const char* name) {
    if (w.format < kF32 || w.format > kFP8)
        return fail(kBadDtype, "%s: unknown format %d", name, w.format);
    if (w.num_experts < 1 || w.num_rows < 0 || w.in_features < 1)
        return fail(kBadShape, "%s: shape [%lld, %lld, %lld]", name, (ll)w.num_experts,
                    (ll)w.num_rows, (ll)w.in_features);
    if ((w.flags & kPaired) != 0 && w.num_rows % 2 != 0)
        return fail(kBadShape, "%s: %lld rows are no pairs", name, (ll)w.num_rows);
    if (w.format == kW8A8 && w.in_features > kMaxInt8K)
        return fail(kBadShape, "%s: w8a8 sums at most %lld products, not %lld", name, (ll)kMaxInt8K,
                    (ll)w.in_features);
    return check_group(w, name);
}

Status launch_pack(const void* args) {
    const auto& a = *static_cast<const PackArgs*>(args);
    Status bad = check_rows(a);
    if (bad == kOk) bad = check_scales(a, PackedLayout(a.weight));
    if (bad == kOk && a.count > 0) pack(a);
    return bad;
}

Status launch_unpack(const void* args) {
    const auto& a = *static_cast<const PackArgs*>(args);
    const Status bad = check_rows(a);
    if (bad == kOk && a.count > 0) unpack(a);
    return bad;
}

Status launch_linear(const void* args) {
    const auto& a = *static_cast<const LinearArgs*>(args);
    Status bad = check_weight(a.weight, "weight");
    if (bad == kOk) bad = check_dtypes(a.x_dtype, a.out_dtype);
    if (bad != kOk || a.num_tokens == 0 || a.weight.num_rows == 0) return bad;
    const Status status = kernels().matmul.linear(a);
    return status == kNoMemory ? fail(status, "no memory for the product's scratch") : status;
}

Status launch_moe_experts(const void* args) {
    const auto& a = *static_cast<const MoeArgs*>(args);
    const bool shared = a.shared_down.data != nullptr;
    const int64_t hidden = a.gate_up.in_features;
    Status bad = check_dtypes(a.x_dtype, a.x_dtype);
    if (bad == kOk) bad = check_weight(a.gate_up, "gate_up");
    if (bad == kOk) bad = check_weight(a.down, "down");
    if (bad == kOk)
        bad = check_expert_shapes(a.gate_up, a.down, hidden, a.gate_up.num_experts, "expert");
    if (bad == kOk && shared) bad = check_weight(a.shared_gate_up, "shared gate_up");
    if (bad == kOk && shared) bad = check_weight(a.shared_down, "shared down");
    if (bad == kOk && shared)
        bad = check_expert_shapes(a.shared_gate_up, a.shared_down, hidden, 1, "shared expert");
    if (bad != kOk) return bad;
    if (a.top_k < 1) return fail(kBadShape, "top_k is %lld", (ll)a.top_k);
    const Status out = check_ids(a.topk_ids, a.num_tokens * a.top_k, a.gate_up.num_experts);
    if (out != kOk || a.num_tokens == 0) return out;
    const Status status = kernels().matmul.moe_experts(a);
    return status == kNoMemory ? fail(status, "no memory for the experts' scratch") : status;
}

}  // namespace moestro
