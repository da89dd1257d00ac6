// Element types, error codes and the argument structs shared by the C ABI and the kernels.
//
// A struct holds pointers, int64, int32 and float only: a copy of its bytes is the same call.
#pragma once

#include <cstdint>

namespace moestro {

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

enum Dtype : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

// What KvPages::dtype may be beside a Dtype: int8 and fp8 E4M3 codes.
enum KvCode : int32_t { kKvInt8 = 3, kKvFp8 = 4 };

enum Status : int32_t { kOk = 0, kBadDtype = 1, kBadShape = 2, kOutOfRange = 3, kNoMemory = 4 };

// One layer's pages, as quant/kv.py spells them: k and v [P, G, B, D], the head dimension
// contiguous; scales [P, G, B], a slot's beside the next one's, null unless the elements are codes.
// Strides are in elements. dtype: Dtype or KvCode.
struct KvPages {
    void* k;
    void* v;
    float* k_scales;
    float* v_scales;
    int64_t k_page_stride, k_head_stride, k_slot_stride;
    int64_t v_page_stride, v_head_stride, v_slot_stride;
    int64_t k_scale_page_stride, k_scale_head_stride;
    int64_t v_scale_page_stride, v_scale_head_stride;
    int64_t num_pages, page_size;
    int32_t dtype, reserved;
};

// The task map of a step's attention; see attention_plan.h. kv_row_bytes: of one position's key
// and value of one kv head, scales included. num_parts: threads to share the work; 0 is all.
struct PlanArgs {
    const int32_t* query_start_loc;  // [S + 1]
    const int32_t* seq_lens;         // [S]
    const int32_t* page_table;       // [S, M]
    int32_t* plan;                   // [capacity]
    int64_t capacity;
    int64_t page_table_stride, page_table_width;
    int64_t num_tokens, num_seqs, num_heads, num_kv_heads, head_dim;
    int64_t kv_row_bytes, num_pages, page_size, num_parts;
};

struct AttentionArgs {
    const void* q;                   // [T, H, D], contiguous
    void* out;                       // [T, H, D], contiguous
    const int32_t* query_start_loc;  // [S + 1]
    const int32_t* seq_lens;         // [S]
    const int32_t* page_table;       // [S, M]
    const int32_t* plan;             // of attention_plan for this batch, or null: made on the way
    KvPages pages;
    int64_t page_table_stride, page_table_width;
    int64_t num_tokens, num_seqs, num_heads, num_kv_heads, head_dim, plan_size;
    int32_t q_dtype;
    float scale;
};

// x: [rows, 2 size]; out: [rows, size].
struct ActivationArgs {
    const void* x;
    void* out;
    int64_t rows, size;
    int32_t dtype, reserved;
};

struct EmbeddingArgs {
    const int64_t* ids;  // [T]
    const void* weight;  // [V, row_bytes]
    void* out;           // [T, row_bytes]
    int64_t num_tokens, vocab_size, row_bytes;
};

// Formats of weights go on where Dtype ends: float ones have their dtype's code.
enum WeightCode : int32_t { kW8A8 = 3, kW4A8 = 4, kFP8 = 5 };
enum WeightFlags : int32_t { kHasZeros = 1, kFp32Scales = 2, kPaired = 4 };

// Matrices [E, M, K] in the packed layout (packed.h); E is 1 for a single one.
struct PackedWeight {
    void* data;
    int64_t num_experts, num_rows, in_features;
    int32_t format;
    int32_t group_size;  // 0: one scale a row
    int32_t flags;
    int32_t reserved;
};

// Moves rows [start, start + count) of one expert between the rows layout and the packed one. ids:
// null, or the count rows that are wanted, in any order (unpack only).
struct PackArgs {
    PackedWeight weight;
    void* codes;
    float* scales;   // [count, groups], null for float formats
    uint8_t* zeros;  // [count, groups] or null
    const int64_t* ids;
    int64_t expert, start, count;
};

// Routed experts with an optional shared one. x and out: [T, N] of x_dtype. Gate and up weights are
// paired.
struct MoeArgs {
    const void* x;
    void* out;
    const int32_t* topk_ids;      // [T, K]
    const float* topk_weights;    // [T, K]
    PackedWeight gate_up;         // [E, 2 I, N]
    PackedWeight down;            // [E, N, I]
    PackedWeight shared_gate_up;  // [2 J, N], or data null
    PackedWeight shared_down;     // [N, J]
    int64_t num_tokens, top_k;
    int32_t x_dtype, fp32_combine;
};

struct LinearArgs {
    const void* x;        // [T, K]
    void* out;            // [T, M]
    PackedWeight weight;  // [M, K]
    int64_t num_tokens;
    int32_t x_dtype, out_dtype;
};

struct NormArgs {
    const void* x;
    const void* residual;  // null: plain RMSNorm
    const void* weight;
    void* out;
    void* summed;  // written when residual is given
    int64_t rows, size;
    float eps;
    int32_t dtype, weight_dtype, reserved;
};

// Two norms side by side; the embedding at position 0 counts as zeros.
struct MtpInputArgs {
    const void* embeddings;     // [rows, size]
    const void* hidden_states;  // [rows, size]
    const int64_t* positions;   // [rows]
    const void* embedding_weight;
    const void* hidden_weight;
    void* out;  // [rows, 2 size]
    int64_t rows, size;
    float eps;
    int32_t dtype, weight_dtype, reserved;
};

struct RopeArgs {
    const void* qkv;  // [T, (H + 2 G) D]
    const void* q_weight;
    const void* k_weight;
    const float* cos_sin;  // [T, R]
    void* q;
    void* k;
    void* v;
    int64_t num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim;
    float eps;
    int32_t dtype, weight_dtype, reserved;
};

struct StoreKvArgs {
    const void* k;  // [T, G, D]; strides of token and head in elements
    const void* v;
    const int64_t* slots;  // [T]
    KvPages pages;
    int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;
    int64_t num_tokens, num_kv_heads, head_dim;
    int32_t dtype, reserved;
};

// Norm and rotation of q and k, and k and v into their pages.
struct RopeStoreArgs {
    const void* qkv;  // [T, (H + 2 G) D]
    const void* q_weight;
    const void* k_weight;
    const float* table;        // [L, R]
    const int64_t* positions;  // [T]
    const int64_t* slots;      // [T]
    void* q;                   // [T, H, D]
    KvPages pages;
    int64_t num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, num_positions;
    float eps;
    int32_t dtype, weight_dtype, hadamard;
};

struct GatingArgs {
    const float* logits;  // [T, E]
    const float* bias;    // [E] or null
    int32_t* topk_ids;
    float* topk_weights;
    int64_t num_tokens, num_experts, top_k;
    float epsilon, scaling;
    int32_t softmax, renormalize;
};

// The router: logits, and the choice of experts from them. Weights as pack_router laid them out
// (backends/cpu/routing.py).
struct RouterArgs {
    const void* x;       // [T, N], contiguous
    const void* weight;  // packed
    const float* bias;   // [E] or null
    int64_t* counts;     // [E] tokens an expert was chosen by, added to; or null
    float* logits;       // [T, E] or null: not kept
    int32_t* topk_ids;   // [T, K]; null: logits only
    float* topk_weights;
    int64_t num_tokens, hidden, num_experts, top_k;
    float epsilon, scaling;
    int32_t softmax, renormalize;
    int32_t x_dtype, terms;  // terms: 0 fp32 weights, 1 or 2 bf16 weights a number
};

// One token a row. All options are [S]; a null pointer means that no row has the option. The logits
// are edited in place while their row is sampled, and put back.
struct SampleArgs {
    float* logits;  // [S, V], row stride in elements
    const double* temperature;
    const int64_t* top_k;
    const double* top_p;
    const double* min_p;
    const int64_t* seed;
    const int64_t* sample_index;
    const int64_t* position;
    const int64_t* bias_starts;  // row r's biases: [starts[r], starts[r] + sizes[r])
    const int64_t* bias_sizes;
    const int64_t* bias_ids;
    const float* bias_values;
    const int64_t* mask_rows;  // row of mask_bits, or -1
    const uint8_t* mask_bits;  // [*, ceil(V / 8)]
    const int64_t* count_starts;
    const int64_t* count_sizes;
    const int64_t* count_ids;
    const int64_t* counts;
    const double* repetition;
    const double* frequency;
    const double* presence;
    const int64_t* num_top;  // log probabilities wanted beside the token's own, or -1
    int64_t* token_ids;
    uint8_t* finite;       // null: -inf among the logits just forbids
    int64_t* logprob_ids;  // [S, logprob_stride], as logprobs and ranks
    double* logprobs;
    int64_t* ranks;
    int64_t num_rows, vocab, row_stride, mask_stride, logprob_stride;
    int64_t num_bias, num_counts, num_masks;  // entries there are, for checks
};

// Log probabilities of one token a row and of the num_top most likely ones.
struct LogprobArgs {
    const float* logits;  // [M, V], row stride in elements
    const int64_t* token_ids;
    int64_t* ids;  // [M, 1 + num_top]
    double* logprobs;
    int64_t* ranks;
    int64_t num_rows, vocab, row_stride, num_top;
};

}  // namespace moestro
