// Joins the families of one level.
#include "level.h"

#define MOESTRO_TEXT_OF(name) #name
#define MOESTRO_TEXT(name) MOESTRO_TEXT_OF(name)

namespace moestro::MOESTRO_LEVEL {

const Kernels& kernels() {
    static const Kernels table = {
        MOESTRO_TEXT(MOESTRO_LEVEL), elementwise_kernels(), matmul_kernels(), attention_kernels(),
        routing_kernels(),           sampling_kernels(),    machine_kernels()};
    return table;
}

}  // namespace moestro::MOESTRO_LEVEL
