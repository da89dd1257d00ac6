// The C ABI: levels, threads, and one entry for every op.
//
// Every function returns a Status; moestro_last_error() then says what was wrong.

#include "api.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "cpuid.h"
#include "packed.h"
#include "thread_pool.h"

namespace moestro {
namespace {

constexpr int32_t kAbiVersion = 3;
constexpr int32_t kMaxThreads = 1024;

constexpr Op kOps[] = {
    {"rms_norm", sizeof(NormArgs), launch_rms_norm},
    {"mtp_input", sizeof(MtpInputArgs), launch_mtp_input},
    {"silu_and_mul", sizeof(ActivationArgs), launch_silu_and_mul},
    {"qk_norm_rope", sizeof(RopeArgs), launch_qk_norm_rope},
    {"store_kv", sizeof(StoreKvArgs), launch_store_kv},
    {"qk_norm_rope_store", sizeof(RopeStoreArgs), launch_qk_norm_rope_store},
    {"embedding", sizeof(EmbeddingArgs), launch_embedding},
    {"linear", sizeof(LinearArgs), launch_linear},
    {"pack", sizeof(PackArgs), launch_pack},
    {"unpack", sizeof(PackArgs), launch_unpack},
    {"moe_gating_top_k", sizeof(GatingArgs), launch_moe_gating_top_k},
    {"moe_router", sizeof(RouterArgs), launch_moe_router},
    {"moe_experts", sizeof(MoeArgs), launch_moe_experts},
    {"attention_plan", sizeof(PlanArgs), launch_attention_plan},
    {"paged_attention", sizeof(AttentionArgs), launch_paged_attention},
    {"sample", sizeof(SampleArgs), launch_sample},
    {"token_logprobs", sizeof(LogprobArgs), launch_token_logprobs},
};
constexpr int32_t kNumOps = sizeof(kOps) / sizeof(kOps[0]);

std::atomic<const Kernels*> g_kernels{nullptr};
thread_local char t_error[256] = "";

const Kernels* find_level(const char* name) {
    if (std::strcmp(name, "portable") == 0) return &portable::kernels();
#if defined(MOESTRO_HAS_AVX2)
    if (std::strcmp(name, "avx2") == 0 && cpu_has_avx2()) return &avx2::kernels();
#endif
#if defined(MOESTRO_HAS_AVX512)
    if (std::strcmp(name, "avx512") == 0 && cpu_has_avx512()) return &avx512::kernels();
#endif
#if defined(MOESTRO_HAS_AMX)
    if (std::strcmp(name, "amx") == 0 && cpu_has_amx()) return &amx::kernels();
#endif
#if defined(MOESTRO_HAS_AMX_EMULATED)
    if (std::strcmp(name, "amx-emulated") == 0 && cpu_has_avx512()) return &amx_emulated::kernels();
#endif
    return nullptr;
}

}  // namespace

const Kernels& kernels() { return *g_kernels.load(std::memory_order_relaxed); }

Status fail(Status status, const char* format, ...) {
    va_list args;
    va_start(args, format);
    std::vsnprintf(t_error, sizeof t_error, format, args);
    va_end(args);
    return status;
}

Status fail_in(Status status, int64_t index, const char* op) {
    char message[sizeof t_error];
    std::memcpy(message, t_error, sizeof message);
    return fail(status, "call %lld of the graph, %s: %.200s", (ll)index, op, message);
}

const Op* find_op(int32_t code) { return code >= 0 && code < kNumOps ? &kOps[code] : nullptr; }

Status check_dtypes(int32_t first, int32_t second) {
    if (known(first) && known(second)) return kOk;
    return fail(kBadDtype, "unknown dtype code %d", known(first) ? second : first);
}

}  // namespace moestro

using namespace moestro;

MOESTRO_API int32_t moestro_abi_version() { return kAbiVersion; }

// The code that moestro_launch takes for an op, or -1.
MOESTRO_API int32_t moestro_op_code(const char* name) {
    for (int32_t op = 0; op < kNumOps; ++op)
        if (std::strcmp(kOps[op].name, name) == 0) return op;
    return -1;
}

// Bytes of an op's argument struct, or -1.
MOESTRO_API int64_t moestro_args_size(int32_t op) {
    return op >= 0 && op < kNumOps ? kOps[op].args_size : -1;
}

MOESTRO_API int32_t moestro_launch(int32_t op, const void* args) {
    const Op* found = find_op(op);
    return found == nullptr ? fail(kBadShape, "no op has code %d", op) : found->launch(args);
}

MOESTRO_API const char* moestro_last_error() { return t_error; }

// Bytes of a packed weight (its data is not looked at), or -1 and an error.
MOESTRO_API int64_t moestro_packed_bytes(const PackedWeight* weight) {
    if (check_weight(*weight, "weight") != kOk) return -1;
    return weight->num_experts * PackedLayout(*weight).matrix_bytes();
}

// 1 when the level was built and this processor runs it.
MOESTRO_API int32_t moestro_has_level(const char* name) { return find_level(name) != nullptr; }

MOESTRO_API int32_t moestro_use_level(const char* name) {
    const Kernels* found = find_level(name);
    if (found == nullptr) return fail(kBadShape, "no level %s", name);
    g_kernels.store(found);
    return kOk;
}

MOESTRO_API const char* moestro_level() {
    const Kernels* now = g_kernels.load();
    return now == nullptr ? "" : now->name;
}

// More threads than processors are allowed: as many run as there are processors.
MOESTRO_API int32_t moestro_set_num_threads(int32_t count) {
    if (count < 1 || count > kMaxThreads)
        return fail(kOutOfRange, "num_threads is %d; it must be from 1 to %d", count, kMaxThreads);
    set_num_workers(count);
    return kOk;
}

// For tests: all of `count` threads run, whatever the number of processors.
MOESTRO_API void moestro_oversubscribe(int32_t count) { set_num_workers(count, true); }

MOESTRO_API int32_t moestro_num_threads() { return num_workers(); }

MOESTRO_API void moestro_release_scratch() { release_scratch(); }
