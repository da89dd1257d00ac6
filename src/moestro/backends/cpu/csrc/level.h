// What every kernel file starts from: the level it is compiled for, as MOESTRO_LEVEL_* says.
//
// Each file in kernels/ is compiled once a level with that level's compiler flags, into the
// namespace moestro::MOESTRO_LEVEL. The vector type F, its width W and the elementary functions lie
// in an unnamed namespace, so that no level's code is ever linked into another's.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels.h"
#include "thread_pool.h"
#include "types.h"

#if defined(MOESTRO_LEVEL_AMX_EMULATED)
#include "emulated_tiles.h"
#define MOESTRO_LEVEL_AMX
#define MOESTRO_LEVEL amx_emulated
#define MOESTRO_LEVEL_NAME "amx-emulated"
#define MOESTRO_VECTORS "vec_avx512.h"
#elif defined(MOESTRO_LEVEL_AMX)
#define MOESTRO_LEVEL amx
#define MOESTRO_LEVEL_NAME "amx"
#define MOESTRO_VECTORS "vec_avx512.h"
#elif defined(MOESTRO_LEVEL_AVX512)
#define MOESTRO_LEVEL avx512
#define MOESTRO_LEVEL_NAME "avx512"
#define MOESTRO_VECTORS "vec_avx512.h"
#elif defined(MOESTRO_LEVEL_AVX2)
#define MOESTRO_LEVEL avx2
#define MOESTRO_LEVEL_NAME "avx2"
#define MOESTRO_VECTORS "vec_avx2.h"
#else
#define MOESTRO_LEVEL portable
#define MOESTRO_LEVEL_NAME "portable"
#define MOESTRO_VECTORS "vec_portable.h"
#endif

namespace moestro::MOESTRO_LEVEL {

// What each family exports to level.cpp.
ElementwiseKernels elementwise_kernels();
MatmulKernels matmul_kernels();
AttentionKernels attention_kernels();
RoutingKernels routing_kernels();
SamplingKernels sampling_kernels();
MachineKernels machine_kernels();

namespace {

// clang-format off: the order matters
#include MOESTRO_VECTORS
#include "math.inl"
#include "rows.inl"
// clang-format on

}  // namespace
}  // namespace moestro::MOESTRO_LEVEL
