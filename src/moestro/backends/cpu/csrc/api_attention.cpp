// Checks and launches attention and its task map.
#include <memory>
#include <new>

#include "api.h"
#include "attention_plan.h"
#include "thread_pool.h"

namespace moestro {
namespace {

struct Pool {
    int64_t num_pages, page_size;
};

// Args: PlanArgs or AttentionArgs. The queries of sequence s, and the pages its length needs. The
// plan and every layer look: a plan tells nothing of the table and the pool it is used with.
template <class Args>
Status check_sequence(const Args& a, const Pool& pool, int64_t s) {
    const int64_t begin = a.query_start_loc[s], end = a.query_start_loc[s + 1];
    const int64_t length = a.seq_lens[s];
    if (begin < 0 || end < begin || end > a.num_tokens)
        return fail(kOutOfRange, "query_start_loc of sequence %lld is [%lld, %lld) of %lld tokens",
                    (ll)s, (ll)begin, (ll)end, (ll)a.num_tokens);
    if (end == begin) return kOk;
    if (length < end - begin)
        return fail(kOutOfRange, "sequence %lld has %lld queries but seq_len %lld", (ll)s,
                    (ll)(end - begin), (ll)length);
    const int64_t pages = (length + pool.page_size - 1) / pool.page_size;
    if (pages > a.page_table_width)
        return fail(kOutOfRange,
                    "sequence %lld of length %lld needs %lld pages; its table has %lld", (ll)s,
                    (ll)length, (ll)pages, (ll)a.page_table_width);
    const int32_t* table = a.page_table + s * a.page_table_stride;
    for (int64_t i = 0; i < pages; ++i)
        if (table[i] < 0 || table[i] >= pool.num_pages)
            return fail(kOutOfRange, "page_table[%lld, %lld] is %d; pages are 0 to %lld", (ll)s,
                        (ll)i, table[i], (ll)pool.num_pages - 1);
    return kOk;
}

template <class Args>
Status check_sequences(const Args& a, const Pool& pool) {
    Status bad = kOk;
    for (int64_t s = 0; bad == kOk && s < a.num_seqs; ++s) bad = check_sequence(a, pool, s);
    return bad;
}

Status check_heads(int64_t heads, int64_t kv_heads, int64_t dim) {
    if (kv_heads < 1 || dim < 1 || heads % kv_heads != 0)
        return fail(kBadShape, "%lld heads over %lld kv heads of %lld", (ll)heads, (ll)kv_heads,
                    (ll)dim);
    if (heads / kv_heads > kMaxGroup)
        return fail(kBadShape, "%lld heads share a kv head; this kernel takes up to %lld",
                    (ll)(heads / kv_heads), (ll)kMaxGroup);
    return kOk;
}

// A plan that is not of this batch would send a thread outside the arrays.
Status check_plan(const AttentionArgs& a) {
    const auto& header = *reinterpret_cast<const PlanHeader*>(a.plan);
    const int64_t group = a.num_heads / a.num_kv_heads;
    if (a.plan_size < 8 || header.num_seqs != a.num_seqs || header.num_tokens != a.num_tokens ||
        header.num_kv_heads != a.num_kv_heads || header.group != group || header.num_tasks < 0 ||
        8 * (1 + int64_t{header.num_tasks}) > a.plan_size)
        return fail(kOutOfRange, "the attention plan was made for another batch");
    const auto* tasks = reinterpret_cast<const PlanTask*>(a.plan + 8);
    for (int64_t i = 0; i < header.num_tasks; ++i) {
        const PlanTask& t = tasks[i];
        bool good = t.seq >= 0 && t.seq < a.num_seqs && t.kv_head >= 0 &&
                    t.kv_head < a.num_kv_heads && t.block >= 0 && t.begin >= 0 && t.begin < t.end &&
                    t.cut < header.num_cut;
        if (good) {
            const int64_t n = a.query_start_loc[t.seq + 1] - a.query_start_loc[t.seq];
            const int64_t skip = t.block * tokens_per_block(group);
            const int64_t last = a.seq_lens[t.seq] - n + skip + tokens_per_block(group) - 1;
            good = skip < n && t.end <= last / kSuper + 1;
            if (t.cut >= 0)
                good = good && t.slot >= 0 && t.first_end > 0 &&
                       t.slot + int64_t{t.end} - t.first_end < header.num_slots;
        }
        if (!good) return fail(kOutOfRange, "task %lld of the attention plan is wrong", (ll)i);
    }
    return kOk;
}

int64_t row_bytes(const KvPages& pages, int64_t dim) {
    if (pages.k_scales != nullptr) return 2 * (dim + 4);
    return 2 * dim * (pages.dtype == kF32 ? 4 : 2);
}

}  // namespace

Status launch_attention_plan(const void* args) {
    PlanArgs a = *static_cast<const PlanArgs*>(args);
    Status bad = check_heads(a.num_heads, a.num_kv_heads, a.head_dim);
    if (bad == kOk && a.page_size < 1) bad = fail(kBadShape, "page_size is %lld", (ll)a.page_size);
    if (bad == kOk) bad = check_sequences(a, {a.num_pages, a.page_size});
    if (bad != kOk) return bad;
    if (a.num_parts == 0) a.num_parts = num_workers();
    if (plan_capacity(a) > a.capacity)
        return fail(kBadShape, "the attention plan has room for %lld int32 and may need %lld",
                    (ll)a.capacity, (ll)plan_capacity(a));
    const Status status = make_plan(a);
    return status == kNoMemory ? fail(status, "no memory for attention's plan") : status;
}

Status launch_paged_attention(const void* args) {
    AttentionArgs a = *static_cast<const AttentionArgs*>(args);
    Status bad = check_dtypes(a.q_dtype, a.q_dtype);
    if (bad == kOk) bad = check_pages(a.pages);
    if (bad == kOk) bad = check_heads(a.num_heads, a.num_kv_heads, a.head_dim);
    if (bad == kOk) bad = check_sequences(a, {a.pages.num_pages, a.pages.page_size});
    if (bad != kOk) return bad;
    std::unique_ptr<int32_t[]> plan;
    if (a.plan == nullptr) {
        PlanArgs p = {a.query_start_loc,
                      a.seq_lens,
                      a.page_table,
                      nullptr,
                      0,
                      a.page_table_stride,
                      a.page_table_width,
                      a.num_tokens,
                      a.num_seqs,
                      a.num_heads,
                      a.num_kv_heads,
                      a.head_dim,
                      row_bytes(a.pages, a.head_dim),
                      a.pages.num_pages,
                      a.pages.page_size,
                      num_workers()};
        p.capacity = plan_capacity(p);
        plan.reset(new (std::nothrow) int32_t[static_cast<size_t>(p.capacity)]);
        if (plan == nullptr) return fail(kNoMemory, "no memory for attention's plan");
        p.plan = plan.get();
        bad = launch_attention_plan(&p);
        a.plan = p.plan;
        a.plan_size = p.capacity;
    }
    if (bad == kOk) bad = check_plan(a);
    if (bad != kOk) return bad;
    const Status status = kernels().attention.paged_attention(a);
    return status == kNoMemory ? fail(status, "no memory for attention's scratch") : status;
}

}  // namespace moestro
