// Checks and launches the ops that turn logits into tokens.
#include "api.h"

namespace moestro {
namespace {

// Segments of rows lie inside `total` entries, and their ids inside the vocabulary.
Status check_segments(const char* what, const int64_t* starts, const int64_t* sizes,
                      const int64_t* ids, const SampleArgs& a, int64_t total) {
    if (sizes == nullptr) return kOk;
    for (int64_t r = 0; r < a.num_rows; ++r) {
        if (sizes[r] < 0 || starts[r] < 0 || sizes[r] > total - starts[r])
            return fail(kOutOfRange, "%s of row %lld are %lld from %lld on, of %lld", what, (ll)r,
                        (ll)sizes[r], (ll)starts[r], (ll)total);
        for (int64_t i = starts[r]; i < starts[r] + sizes[r]; ++i)
            if (ids[i] < 0 || ids[i] >= a.vocab)
                return fail(kOutOfRange, "%s: token_ids[%lld] is %lld; the vocabulary is 0 to %lld",
                            what, (ll)i, (ll)ids[i], (ll)a.vocab - 1);
    }
    return kOk;
}

}  // namespace

Status launch_sample(const void* args) {
    const auto& a = *static_cast<const SampleArgs*>(args);
    if (a.num_rows == 0) return kOk;
    if (a.vocab < 1) return fail(kBadShape, "a vocabulary of %lld tokens", (ll)a.vocab);
    Status bad = check_segments("biases", a.bias_starts, a.bias_sizes, a.bias_ids, a, a.num_bias);
    if (bad != kOk) return bad;
    bad = check_segments("counts", a.count_starts, a.count_sizes, a.count_ids, a, a.num_counts);
    if (bad != kOk) return bad;
    for (int64_t r = 0; r < a.num_rows; ++r) {
        if (a.num_top && a.num_top[r] >= a.logprob_stride)
            return fail(kOutOfRange,
                        "row %lld wants %lld log probabilities; there is room for %lld", (ll)r,
                        (ll)a.num_top[r], (ll)a.logprob_stride - 1);
        if (a.mask_rows && a.mask_rows[r] >= a.num_masks)
            return fail(kOutOfRange, "row %lld has mask %lld of %lld", (ll)r, (ll)a.mask_rows[r],
                        (ll)a.num_masks);
    }
    const Status status = kernels().sampling.sample(a);
    return status == kNoMemory ? fail(status, "no memory for the sampler's scratch") : status;
}

Status launch_token_logprobs(const void* args) {
    const auto& a = *static_cast<const LogprobArgs*>(args);
    if (a.num_rows == 0) return kOk;
    if (a.num_top < 0 || a.num_top > a.vocab)
        return fail(kBadShape, "%lld log probabilities of %lld tokens", (ll)a.num_top, (ll)a.vocab);
    for (int64_t r = 0; r < a.num_rows; ++r)
        if (a.token_ids[r] < 0 || a.token_ids[r] >= a.vocab)
            return fail(kOutOfRange, "token_ids[%lld] is %lld; the vocabulary is 0 to %lld", (ll)r,
                        (ll)a.token_ids[r], (ll)a.vocab - 1);
    const Status status = kernels().sampling.token_logprobs(a);
    return status == kNoMemory ? fail(status, "no memory for the sampler's scratch") : status;
}

}  // namespace moestro
