// From logits to tokens.
#include "level.h"

namespace moestro::MOESTRO_LEVEL {

SamplingKernels sampling_kernels() { return {}; }

}  // namespace moestro::MOESTRO_LEVEL
