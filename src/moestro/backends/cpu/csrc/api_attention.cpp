// Checks and launches attention.
#include "api.h"

namespace moestro {
namespace {

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
    const int64_t pages = (length + a.pages.page_size - 1) / a.pages.page_size;
    if (pages > a.page_table_width)
        return fail(kOutOfRange,
                    "sequence %lld of length %lld needs %lld pages; its table has %lld", (ll)s,
                    (ll)length, (ll)pages, (ll)a.page_table_width);
    const int32_t* table = a.page_table + s * a.page_table_stride;
    for (int64_t i = 0; i < pages; ++i)
        if (table[i] < 0 || table[i] >= a.pages.num_pages)
            return fail(kOutOfRange, "page_table[%lld, %lld] is %d; pages are 0 to %lld", (ll)s,
                        (ll)i, table[i], (ll)a.pages.num_pages - 1);
    return kOk;
}

}  // namespace

Status launch_paged_attention(const void* args) {
    const auto& a = *static_cast<const AttentionArgs*>(args);
    Status bad = check_dtypes(a.q_dtype, a.q_dtype);
    if (bad == kOk) bad = check_pages(a.pages);
    if (bad != kOk) return bad;
    if (a.num_kv_heads < 1 || a.head_dim < 1 || a.num_heads % a.num_kv_heads != 0)
        return fail(kBadShape, "%lld heads over %lld kv heads of %lld", (ll)a.num_heads,
                    (ll)a.num_kv_heads, (ll)a.head_dim);
    if (a.num_heads / a.num_kv_heads > kMaxGroup)
        return fail(kBadShape, "%lld heads share a kv head; this kernel takes up to %lld",
                    (ll)(a.num_heads / a.num_kv_heads), (ll)kMaxGroup);
    for (int64_t s = 0; s < a.num_seqs; ++s) {
        const Status wrong = check_sequence(a, s);
        if (wrong != kOk) return wrong;
    }
    const Status status = kernels().attention.paged_attention(a);
    return status == kNoMemory ? fail(status, "no memory for attention's scratch") : status;
}

}  // namespace moestro
