// Causal grouped-query attention over paged KV.
//
// Positions are cut at fixed absolute places: tiles of kTile, super-tiles of kSuper. Each
// super-tile starts from a fresh softmax state and takes its tiles in order; the states of
// super-tiles are merged in order. A query's result is therefore a function of its q and of the
// keys and values up to its position: chunking, batching and the split over threads change who
// computes, never what.

constexpr int64_t kTile = 64;
constexpr int64_t kSuper = 512;
constexpr int64_t kQueryRows = 64;  // rows (token, head of the group) that share a tile's keys
constexpr int64_t kSplitBytes = int64_t{64} << 20;

// Softmax state of up to kQueryRows rows: running maximum, sum and weighted values.
struct RowState {
    float* highest;  // [rows]
    float* sum;      // [rows]
    float* acc;      // [rows, D]
};

// The rows of one block of queries: token-major, the heads of a group beside each other.
struct QueryBlock {
    int64_t seq, kv_head, first_token, rows;
    int64_t first_position, last_position;  // of the block's first and last token
    int64_t supers;                         // how many super-tiles its last token reaches
};

// What both kinds of kernel share: how the queries of a batch are cut into blocks.
struct AttentionShape {
    const AttentionArgs& a;
    int64_t group, dim, tokens_per_block;

    explicit AttentionShape(const AttentionArgs& args)
        : a(args),
          group(args.num_heads / args.num_kv_heads),
          dim(args.head_dim),
          tokens_per_block(kQueryRows / group > 0 ? kQueryRows / group : 1) {}

    int64_t block_count(int64_t seq) const {
        const int64_t n = a.query_start_loc[seq + 1] - a.query_start_loc[seq];
        return blocks(n, tokens_per_block);
    }

    QueryBlock block_at(int64_t seq, int64_t kv_head, int64_t index) const {
        const int64_t begin = a.query_start_loc[seq], n = a.query_start_loc[seq + 1] - begin;
        const int64_t skip = index * tokens_per_block;
        const int64_t tokens = smaller(tokens_per_block, n - skip);
        QueryBlock block;
        block.seq = seq;
        block.kv_head = kv_head;
        block.first_token = begin + skip;
        block.rows = tokens * group;
        block.first_position = a.seq_lens[seq] - n + skip;
        block.last_position = block.first_position + tokens - 1;
        block.supers = block.last_position / kSuper + 1;
        return block;
    }

    // The first row of a block that reaches position `start`.
    int64_t first_row(const QueryBlock& block, int64_t start) const {
        const int64_t skipped = start - block.first_position;
        return skipped > 0 ? skipped * group : 0;
    }

    // The element of q or out where row r of a block begins.
    int64_t row_offset(const QueryBlock& block, int64_t r) const {
        const int64_t token = block.first_token + r / group;
        return (token * a.num_heads + block.kv_head * group + r % group) * dim;
    }

    // Where n positions of a block's sequence begin in a pool of the given strides.
    template <class T>
    void find_rows(const QueryBlock& block, int64_t start, int64_t n, const void* pool,
                   int64_t page_stride, int64_t head_stride, int64_t slot_stride,
                   const T** rows) const {
        const int32_t* table = a.page_table + block.seq * a.page_table_stride;
        const T* head = static_cast<const T*>(pool) + block.kv_head * head_stride;
        int64_t page = start / a.pages.page_size, slot = start % a.pages.page_size;
        for (int64_t j = 0; j < n;) {
            const T* at = head + table[page] * page_stride + slot * slot_stride;
            for (; j < n && slot < a.pages.page_size; ++j, ++slot, at += slot_stride) rows[j] = at;
            ++page;
            slot = 0;
        }
    }
    // The scales of n positions' keys and of their values.
    void find_scales(const QueryBlock& block, int64_t start, int64_t n, float* k, float* v) const {
        const float *keys[kTile], *values[kTile];
        const KvPages& p = a.pages;
        find_rows(block, start, n, p.k_scales, p.k_scale_page_stride, p.k_scale_head_stride, 1,
                  keys);
        find_rows(block, start, n, p.v_scales, p.v_scale_page_stride, p.v_scale_head_stride, 1,
                  values);
        for (int64_t j = 0; j < n; ++j) k[j] = *keys[j], v[j] = *values[j];
    }
    template <class T>
    void find_keys(const QueryBlock& block, int64_t start, int64_t n, const T** rows) const {
        find_rows(block, start, n, a.pages.k, a.pages.k_page_stride, a.pages.k_head_stride,
                  a.pages.k_slot_stride, rows);
    }
    template <class T>
    void find_values(const QueryBlock& block, int64_t start, int64_t n, const T** rows) const {
        find_rows(block, start, n, a.pages.v, a.pages.v_page_stride, a.pages.v_head_stride,
                  a.pages.v_slot_stride, rows);
    }
};

// One unit of work: a block of queries, or one of its super-tiles when `slot` names a place for
// its state.
struct AttentionWork {
    QueryBlock block;
    int64_t super;
    int64_t slot;
};

// Kernel: see Attention in attention_f32.inl.
template <class Kernel>
Status attend(const AttentionArgs& args) {
    const Kernel op(args);
    const int workers = num_workers();
    int64_t num_blocks = 0, num_supers = 0;
    for (int64_t s = 0; s < args.num_seqs; ++s)
        for (int64_t i = 0; i < op.block_count(s); ++i) {
            num_blocks += args.num_kv_heads;
            num_supers += args.num_kv_heads * op.block_at(s, 0, i).supers;
        }
    if (num_blocks == 0) return kOk;
    const int64_t states = num_supers * op.state_floats() * 4;
    const bool split =
        workers > 1 && num_blocks < 4 * workers && num_supers > num_blocks && states <= kSplitBytes;
    const int64_t num_work = split ? num_supers : num_blocks;
    const int64_t worker_bytes = lines(op.worker_floats() * 4);
    const int64_t bytes = lines(num_work * static_cast<int64_t>(sizeof(AttentionWork))) +
                          worker_bytes * workers + (split ? states : 0);
    char* base = static_cast<char*>(call_scratch(static_cast<size_t>(bytes)));
    if (base == nullptr) return kNoMemory;
    char* worker_base = base + lines(num_work * static_cast<int64_t>(sizeof(AttentionWork)));
    float* state_base = reinterpret_cast<float*>(worker_base + worker_bytes * workers);
    AttentionWork* work = reinterpret_cast<AttentionWork*>(base);
    int64_t n = 0;
    for (int64_t s = 0; s < args.num_seqs; ++s)
        for (int64_t i = op.block_count(s) - 1; i >= 0; --i)  // longest first
            for (int64_t g = 0; g < args.num_kv_heads; ++g) {
                const QueryBlock block = op.block_at(s, g, i);
                for (int64_t super = 0; super < (split ? block.supers : 1); ++super, ++n)
                    work[n] = {block, super, split ? n : -1};
            }
    const auto buffers = [&](int worker) {
        return op.buffers(reinterpret_cast<float*>(worker_base + worker * worker_bytes));
    };
    const auto state = [&](int64_t slot) {
        return op.state_at(state_base + slot * op.state_floats());
    };
    parallel(
        num_work,
        [&](int64_t i, int worker) {
            auto b = buffers(worker);
            if (!split) return op.run_block(work[i].block, b);
            b.part = state(work[i].slot);
            op.load_queries(work[i].block, b);
            op.take_super(work[i].block, work[i].super, b);
        },
        workers);
    if (!split) return kOk;
    parallel(
        num_work,
        [&](int64_t i, int worker) {
            if (work[i].super != 0) return;
            const QueryBlock& block = work[i].block;
            const auto b = buffers(worker);
            for (int64_t super = 0; super < block.supers; ++super) {
                op.merge(state(work[i + super].slot), op.first_row(block, super * kSuper),
                         block.rows, super == 0, b.whole);
            }
            op.write(block, b.whole);
        },
        workers);
    return kOk;
}
