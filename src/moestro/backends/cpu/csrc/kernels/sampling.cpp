// From logits to tokens: edits, selection, the draw, log probabilities.
#include <cmath>
#include <cstring>

#include "level.h"

namespace moestro::MOESTRO_LEVEL {
namespace {

// clang-format off: the order matters
#include "sampling_vec.inl"
#include "sampling_noise.inl"
#include "sampling_scan.inl"
#include "sampling_select.inl"
#include "sampling_draw.inl"
#include "sampling_logprobs.inl"
#include "sampling.inl"
// clang-format on

}  // namespace

SamplingKernels sampling_kernels() { return {sample, token_logprobs}; }

}  // namespace moestro::MOESTRO_LEVEL
