// What the files of the C ABI share: errors, checks, and the entry of each op.
//
// A launch_* function checks the arguments and calls the chosen level's kernel. Pointers are
// trusted to hold what the sizes say; ids, slots and pages are checked.
#pragma once

#include "kernels.h"
#include "types.h"

#define MOESTRO_API extern "C" __attribute__((visibility("default")))

namespace moestro {

using ll = long long;  // for printf

// The chosen level's kernels.
const Kernels& kernels();

// Keeps a message for moestro_last_error and returns the status.
__attribute__((format(printf, 2, 3))) Status fail(Status status, const char* format, ...);

// Puts the call of a graph in front of the message that is kept; returns the status.
Status fail_in(Status status, int64_t index, const char* op);

inline bool known(int32_t dtype) { return dtype >= kF32 && dtype <= kF16; }

Status check_dtypes(int32_t first, int32_t second);
Status check_pages(const KvPages& pages);
// Whether the layout can hold a weight; `name` is what the message calls it.
Status check_weight(const PackedWeight& w, const char* name);

// One op of the ABI: its name, the size of its argument struct, and what launches it.
struct Op {
    const char* name;
    int64_t args_size;
    Status (*launch)(const void* args);
};

// The op of a code; null when there is none.
const Op* find_op(int32_t code);

Status launch_rms_norm(const void* args);
Status launch_mtp_input(const void* args);
Status launch_silu_and_mul(const void* args);
Status launch_qk_norm_rope(const void* args);
Status launch_store_kv(const void* args);
Status launch_qk_norm_rope_store(const void* args);
Status launch_embedding(const void* args);
Status launch_linear(const void* args);
Status launch_pack(const void* args);
Status launch_unpack(const void* args);
Status launch_moe_experts(const void* args);
Status launch_moe_gating_top_k(const void* args);
Status launch_moe_router(const void* args);
Status launch_attention_plan(const void* args);
Status launch_paged_attention(const void* args);
Status launch_sample(const void* args);
Status launch_token_logprobs(const void* args);

}  // namespace moestro
