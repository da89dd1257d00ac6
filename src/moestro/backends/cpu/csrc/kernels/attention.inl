// Causal grouped-query attention over paged KV.
//
// Positions are cut at fixed absolute places: tiles of kTile, super-tiles of kSuper. Each
// super-tile starts from a fresh softmax state and takes its tiles in order; the states of
// super-tiles are merged in order. A query's result is therefore a function of its q and of the
// keys and values up to its position: chunking, batching and the split over threads change who
// computes, never what.

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
    int64_t group, dim, block_tokens;

    explicit AttentionShape(const AttentionArgs& args)
        : a(args),
          group(args.num_heads / args.num_kv_heads),
          dim(args.head_dim),
          block_tokens(tokens_per_block(group)) {}

    QueryBlock block_at(int64_t seq, int64_t kv_head, int64_t index) const {
        const int64_t begin = a.query_start_loc[seq], n = a.query_start_loc[seq + 1] - begin;
        const int64_t skip = index * block_tokens;
        const int64_t tokens = smaller(block_tokens, n - skip);
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

// Runs a plan's tasks: each worker takes the next one, largest first. A unit that is one task is
// merged on the way. Of a cut unit every task leaves its states; who finds that none is left to do
// merges them in order.
//
// Kernel: see Attention in attention_f32.inl.
template <class Kernel>
struct AttentionRun {
    const Kernel op;
    const PlanHeader& header;
    const PlanTask* tasks;
    int workers = num_workers();
    int64_t state_rows;
    char* worker_base = nullptr;
    float* state_base = nullptr;
    int32_t* left = nullptr;  // tasks of each cut unit still to do

    explicit AttentionRun(const AttentionArgs& args)
        : op(args),
          header(*reinterpret_cast<const PlanHeader*>(args.plan)),
          tasks(reinterpret_cast<const PlanTask*>(args.plan + 8)),
          state_rows((header.state_rows + 15) / 16 * 16) {}

    int64_t worker_bytes() const { return lines(op.worker_floats() * 4); }

    RowState state(int64_t slot) const {
        return op.state_at(state_base + slot * op.state_floats(state_rows), state_rows);
    }

    bool find_memory() {
        const int64_t counts = lines(header.num_cut * static_cast<int64_t>(sizeof(*left)));
        const int64_t states = header.num_slots * op.state_floats(state_rows) * 4;
        const int64_t bytes = counts + worker_bytes() * workers + states;
        char* base = static_cast<char*>(call_scratch(static_cast<size_t>(bytes)));
        if (base == nullptr) return false;
        left = reinterpret_cast<int32_t*>(base);
        worker_base = base + counts;
        state_base = reinterpret_cast<float*>(worker_base + worker_bytes() * workers);
        for (int64_t i = 0; i < header.num_cut; ++i) left[i] = 0;
        for (int64_t i = 0; i < header.num_tasks; ++i)
            if (tasks[i].cut >= 0) ++left[tasks[i].cut];
        return true;
    }

    template <class Buffers>
    void run_part(const PlanTask& task, const QueryBlock& block, Buffers b) const {
        if (task.begin == 0) b.whole = state(task.slot);
        op.load_queries(block, b);
        for (int64_t super = task.begin; super < task.end; ++super) {
            if (task.begin != 0) b.part = state(task.slot + 1 + super - task.first_end);
            const int64_t from = op.take_super(block, super, b);
            if (task.begin == 0) op.merge(b.part, from, block.rows, super == 0, b.whole);
        }
        if (__atomic_fetch_sub(left + task.cut, 1, __ATOMIC_ACQ_REL) != 1) return;
        const RowState whole = state(task.slot);
        for (int64_t super = task.first_end; super < block.supers; ++super)
            op.merge(state(task.slot + 1 + super - task.first_end),
                     op.first_row(block, super * kSuper), block.rows, false, whole);
        op.write(block, whole);
    }

    void run() const {
        int64_t next = 0;
        const auto take = [&] { return __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED); };
        const auto work = [&](int64_t, int worker) {
            const auto b =
                op.buffers(reinterpret_cast<float*>(worker_base + worker * worker_bytes()));
            for (int64_t i = take(); i < header.num_tasks; i = take()) {
                const PlanTask& task = tasks[i];
                const QueryBlock block = op.block_at(task.seq, task.kv_head, task.block);
                task.cut < 0 ? op.run_block(block, b) : run_part(task, block, b);
            }
        };
        parallel(smaller(workers, header.num_tasks), work, workers);
    }
};

template <class Kernel>
Status attend(const AttentionArgs& args) {
    AttentionRun<Kernel> run(args);
    if (run.header.num_tasks == 0) return kOk;
    if (!run.find_memory()) return kNoMemory;
    run.run();
    return kOk;
}
