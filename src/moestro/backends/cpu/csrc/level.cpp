// Joins the families of one level.
#include "level.h"

namespace moestro::MOESTRO_LEVEL {

const Kernels& kernels() {
    static const Kernels table = {MOESTRO_LEVEL_NAME,  elementwise_kernels(), matmul_kernels(),
                                  attention_kernels(), routing_kernels(),     sampling_kernels(),
                                  machine_kernels()};
    return table;
}

}  // namespace moestro::MOESTRO_LEVEL
