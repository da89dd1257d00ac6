// The C ABI: checks the arguments, then hands them to the chosen level's kernels.
//
// Every function returns a Status; moestro_last_error() then says what was wrong. Pointers are
// trusted to hold what the sizes say; ids, slots and pages are checked here.

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "cpuid.h"
#include "thread_pool.h"
#include "types.h"

using namespace moestro;

#define MOESTRO_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int32_t kAbiVersion = 1;
constexpr int64_t kMaxExperts = 4096;
constexpr int64_t kMaxGroup = 64;

std::atomic<const Kernels*> g_kernels{nullptr};
thread_local char t_error[256] = "";

__attribute__((format(printf, 2, 3))) Status fail(Status status, const char* format, ...) {
    va_list args;
    va_start(args, format);
    std::vsnprintf(t_error, sizeof t_error, format, args);
    va_end(args);
    return status;
}

using ll = long long;

const Kernels* find_level(const char* name) {
    if (std::strcmp(name, "portable") == 0) return portable_kernels();
    if (std::strcmp(name, "avx2") == 0 && cpu_has_avx2()) return avx2_kernels();
    if (std::strcmp(name, "avx512") == 0 && cpu_has_avx512()) return avx512_kernels();
    if (std::strcmp(name, "amx") == 0 && cpu_has_amx()) return amx_kernels();
    return nullptr;
}

const Kernels& kernels() { return *g_kernels.load(std::memory_order_relaxed); }

bool known(int32_t dtype) { return dtype >= kF32 && dtype <= kF16; }

Status check_pair(int32_t x, int32_t weight) {
    if (!known(x) || !known(weight)) return fail(kBadDtype, "unknown dtype code");
    if (x != kF32 && x != weight)
        return fail(kBadDtype, "the weight must have x's dtype, or x be float32");
    return kOk;
}

Status check_ids(const int32_t* ids, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; ++i)
        if (ids[i] < 0 || ids[i] >= limit)
            return fail(kOutOfRange, "topk_ids[%lld] is %d; experts are 0 to %lld", (ll)i, ids[i],
                        (ll)limit - 1);
    return kOk;
}

// The page ids of sequence s that its seq_len needs.
Status check_sequence(const AttentionArgs& a, int64_t s) {
    const int64_t begin = a.query_start_loc[s], end = a.query_start_loc[s + 1];
    const int64_t length = a.seq_lens[s];
    if (begin < 0 || end < begin || end > a.num_tokens)
        return fail(kOutOfRange, "query_start_loc of sequence %lld is [%lld, %lld) of %lld tokens",
                    (ll)s, (ll)begin, (ll)end, (ll)a.num_tokens);
    if (end == begin) return kOk;
    if (length < end - begin)
        return fail(kOutOfRange, "sequence %lld has %lld queries but seq_len %lld", (ll)s,
                    (ll)(end - begin), (ll)length);
    const int64_t pages = (length + a.page_size - 1) / a.page_size;
    if (pages > a.page_table_width)
        return fail(kOutOfRange,
                    "sequence %lld of length %lld needs %lld pages; its table has %lld", (ll)s,
                    (ll)length, (ll)pages, (ll)a.page_table_width);
    const int32_t* table = a.page_table + s * a.page_table_stride;
    for (int64_t i = 0; i < pages; ++i)
        if (table[i] < 0 || table[i] >= a.num_pages)
            return fail(kOutOfRange, "page_table[%lld, %lld] is %d; pages are 0 to %lld", (ll)s,
                        (ll)i, table[i], (ll)a.num_pages - 1);
    return kOk;
}

}  // namespace

MOESTRO_API int32_t moestro_abi_version() { return kAbiVersion; }

MOESTRO_API int64_t moestro_sizeof(int32_t which) {
    constexpr int64_t sizes[] = {sizeof(AttentionArgs), sizeof(MoeArgs), sizeof(StoreKvArgs)};
    return which >= 0 && which < 3 ? sizes[which] : -1;
}

MOESTRO_API const char* moestro_last_error() { return t_error; }

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

MOESTRO_API void moestro_set_num_threads(int32_t count) { set_num_workers(count); }

MOESTRO_API int32_t moestro_num_threads() { return num_workers(); }

// Asks the system to back whole 2 MiB pages inside [data, data + bytes) by pages of that size: to
// be called before they are first touched. A wish, not a need; the contents stay.
MOESTRO_API void moestro_use_large_pages(void* data, int64_t bytes) {
#if defined(__linux__)
    constexpr uintptr_t kLarge = uintptr_t{2} << 20;
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kLarge - 1) / kLarge * kLarge;
    const uintptr_t end =
        (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / kLarge * kLarge;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
#endif
}

MOESTRO_API void moestro_release_scratch() { release_scratch(); }

MOESTRO_API int32_t moestro_rms_norm(const void* x, const void* residual, const void* weight,
                                     void* out, void* summed, int64_t rows, int64_t size, float eps,
                                     int32_t dtype, int32_t weight_dtype) {
    if (!known(dtype) || !known(weight_dtype)) return fail(kBadDtype, "unknown dtype code");
    if (rows == 0 || size == 0) return kOk;
    kernels().rms_norm({x, residual, weight, out, summed, rows, size, eps, dtype, weight_dtype});
    return kOk;
}

MOESTRO_API int32_t moestro_silu_and_mul(const void* x, void* out, int64_t rows, int64_t size,
                                         int32_t dtype) {
    if (!known(dtype)) return fail(kBadDtype, "unknown dtype code");
    if (rows > 0 && size > 0) kernels().silu_and_mul(x, out, rows, size, dtype);
    return kOk;
}

MOESTRO_API int32_t moestro_qk_norm_rope(const void* qkv, const void* q_weight,
                                         const void* k_weight, const float* cos_sin, void* q,
                                         void* k, void* v, int64_t num_tokens, int64_t num_heads,
                                         int64_t num_kv_heads, int64_t head_dim, float eps,
                                         int32_t dtype, int32_t weight_dtype) {
    if (!known(dtype) || !known(weight_dtype)) return fail(kBadDtype, "unknown dtype code");
    if (head_dim < 2 || head_dim % 2 != 0)
        return fail(kBadShape, "head_dim is %lld; rotary pairs need an even one", (ll)head_dim);
    if (num_tokens == 0) return kOk;
    kernels().qk_norm_rope({qkv, q_weight, k_weight, cos_sin, q, k, v, num_tokens, num_heads,
                            num_kv_heads, head_dim, eps, dtype, weight_dtype});
    return kOk;
}

MOESTRO_API int32_t moestro_store_kv(const StoreKvArgs* a, int64_t num_pages) {
    if (!known(a->dtype) || !known(a->page_dtype)) return fail(kBadDtype, "unknown dtype code");
    const int64_t slots = num_pages * a->page_size;
    for (int64_t t = 0; t < a->num_tokens; ++t)
        if (a->slots[t] < -1 || a->slots[t] >= slots)
            return fail(kOutOfRange, "slot_mapping[%lld] is %lld; slots are -1 (skip) to %lld",
                        (ll)t, (ll)a->slots[t], (ll)slots - 1);
    if (a->num_tokens > 0) kernels().store_kv(*a);
    return kOk;
}

MOESTRO_API int32_t moestro_embedding(const int64_t* ids, const void* weight, void* out,
                                      int64_t num_tokens, int64_t vocab, int64_t row_bytes) {
    for (int64_t t = 0; t < num_tokens; ++t)
        if (ids[t] < 0 || ids[t] >= vocab)
            return fail(kOutOfRange, "input_ids[%lld] is %lld; the vocabulary is 0 to %lld", (ll)t,
                        (ll)ids[t], (ll)vocab - 1);
    for (int64_t t = 0; t < num_tokens; ++t)
        std::memcpy(static_cast<char*>(out) + t * row_bytes,
                    static_cast<const char*>(weight) + ids[t] * row_bytes,
                    static_cast<size_t>(row_bytes));
    return kOk;
}

MOESTRO_API int32_t moestro_linear(const void* x, const void* weight, void* out, int64_t num_tokens,
                                   int64_t in_features, int64_t out_features, int32_t x_dtype,
                                   int32_t weight_dtype, int32_t out_dtype) {
    const Status bad = check_pair(x_dtype, weight_dtype);
    if (bad != kOk) return bad;
    if (!known(out_dtype)) return fail(kBadDtype, "unknown dtype code");
    if (in_features < 1) return fail(kBadShape, "in_features is %lld", (ll)in_features);
    if (num_tokens == 0 || out_features == 0) return kOk;
    const Status status = kernels().linear(
        {x, weight, out, num_tokens, in_features, out_features, x_dtype, weight_dtype, out_dtype});
    return status == kNoMemory ? fail(status, "no memory for the product's scratch") : status;
}

MOESTRO_API int32_t moestro_moe_gating_top_k(const float* logits, const float* bias,
                                             int32_t* topk_ids, float* topk_weights,
                                             int64_t num_tokens, int64_t num_experts, int64_t top_k,
                                             float epsilon, float scaling, int32_t softmax,
                                             int32_t renormalize) {
    if (num_experts < 1 || num_experts > kMaxExperts)
        return fail(kBadShape, "%lld experts; this kernel takes 1 to %lld", (ll)num_experts,
                    (ll)kMaxExperts);
    if (top_k < 1 || top_k > num_experts)
        return fail(kBadShape, "top_k is %lld of %lld experts", (ll)top_k, (ll)num_experts);
    if (num_tokens == 0) return kOk;
    kernels().moe_gating_top_k({logits, bias, topk_ids, topk_weights, num_tokens, num_experts,
                                top_k, epsilon, scaling, softmax, renormalize});
    return kOk;
}

MOESTRO_API int32_t moestro_moe_experts(const MoeArgs* a) {
    const Status bad = check_pair(a->x_dtype, a->weight_dtype);
    if (bad != kOk) return bad;
    if (a->hidden < 1 || a->intermediate < 1 || a->top_k < 1 ||
        (a->shared_down != nullptr && a->shared_intermediate < 1))
        return fail(kBadShape, "a size of moe_experts is not positive");
    if (a->num_tokens > (int64_t{1} << 31) / a->top_k - 1)
        return fail(kBadShape, "%lld tokens are too many for one call", (ll)a->num_tokens);
    const Status out = check_ids(a->topk_ids, a->num_tokens * a->top_k, a->num_experts);
    if (out != kOk) return out;
    if (a->num_tokens == 0) return kOk;
    const Status status = kernels().moe_experts(*a);
    return status == kNoMemory ? fail(status, "no memory for the experts' scratch") : status;
}

MOESTRO_API int32_t moestro_paged_attention(const AttentionArgs* a) {
    if (!known(a->q_dtype) || !known(a->kv_dtype)) return fail(kBadDtype, "unknown dtype code");
    if (a->num_kv_heads < 1 || a->head_dim < 1 || a->page_size < 1 ||
        a->num_heads % a->num_kv_heads != 0)
        return fail(kBadShape, "%lld heads over %lld kv heads of %lld, page_size %lld",
                    (ll)a->num_heads, (ll)a->num_kv_heads, (ll)a->head_dim, (ll)a->page_size);
    if (a->num_heads / a->num_kv_heads > kMaxGroup)
        return fail(kBadShape, "%lld heads share a kv head; this kernel takes up to %lld",
                    (ll)(a->num_heads / a->num_kv_heads), (ll)kMaxGroup);
    for (int64_t s = 0; s < a->num_seqs; ++s) {
        const Status bad = check_sequence(*a, s);
        if (bad != kOk) return bad;
    }
    const Status status = kernels().paged_attention(*a);
    return status == kNoMemory ? fail(status, "no memory for attention's scratch") : status;
}
