// One ISA level's kernels, a table a family. Arguments are validated before they get here.
#pragma once

#include "types.h"

namespace moestro {

// Limits that callers check, and that kernels size their local arrays by.
constexpr int64_t kMaxExperts = 4096;
constexpr int64_t kMaxGroup = 64;
constexpr int64_t kMaxHeadDim = 1024;  // of heads that are kept in pages

struct ElementwiseKernels {
    void (*rms_norm)(const NormArgs&);
    void (*mtp_input)(const MtpInputArgs&);
    void (*silu_and_mul)(const ActivationArgs&);
    void (*qk_norm_rope)(const RopeArgs&);
    void (*store_kv)(const StoreKvArgs&);
    void (*qk_norm_rope_store)(const RopeStoreArgs&);
};

struct MatmulKernels {
    Status (*linear)(const LinearArgs&);
    Status (*moe_experts)(const MoeArgs&);
};

struct AttentionKernels {
    Status (*paged_attention)(const AttentionArgs&);
};

struct RoutingKernels {
    void (*moe_gating_top_k)(const GatingArgs&);
    Status (*moe_router)(const RouterArgs&);
};

struct SamplingKernels {
    Status (*sample)(const SampleArgs&);
    Status (*token_logprobs)(const LogprobArgs&);
};

// One loop of a level's best instruction on registers alone, and how many operations a round of it
// does (a multiply-add is two); null where the level has no such instruction.
struct Peak {
    float (*run)(int64_t rounds);
    int64_t operations;
};

struct MachineKernels {
    static constexpr int kKinds = 3;
    Peak peaks[kKinds];  // fp32, bf16, int8
    float (*read)(const float* data, int64_t count);
};

struct Kernels {
    const char* name;
    ElementwiseKernels elementwise;
    MatmulKernels matmul;
    AttentionKernels attention;
    RoutingKernels routing;
    SamplingKernels sampling;
    MachineKernels machine;
};

// The table of each level that this build has; level.cpp defines one a level.
namespace portable {
const Kernels& kernels();
}
namespace avx2 {
const Kernels& kernels();
}
namespace avx512 {
const Kernels& kernels();
}
namespace amx {
const Kernels& kernels();
}
namespace amx_emulated {  // in builds for tests only
const Kernels& kernels();
}

}  // namespace moestro
