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
    int64_t first_position;  // of the block's first token
    int64_t supers;          // how many super-tiles its last token reaches
};

// c[r, lanes] (+)= sum_i a[r, i] * b[i, lanes], i from low to high: R rows, C vectors of lanes.
template <int R, int C>
inline void outer_tile(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t k,
                       float* c, int64_t ldc, bool add) {
    F acc[R][C];
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < C; ++j) acc[r][j] = add ? load(c + r * ldc + j * W) : zero();
    for (int64_t i = 0; i < k; ++i) {
        F v[C];
        for (int j = 0; j < C; ++j) v[j] = load(b + i * ldb + j * W);
        for (int r = 0; r < R; ++r) {
            const F s = set1(a[r * lda + i]);
            for (int j = 0; j < C; ++j) acc[r][j] = fma(s, v[j], acc[r][j]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < C; ++j) store(c + r * ldc + j * W, acc[r][j]);
}

template <int C>
inline void outer_rows(const float* a, int64_t lda, int64_t n, const float* b, int64_t ldb,
                       int64_t k, float* c, int64_t ldc, bool add) {
    int64_t r = 0;
    for (; r + MR <= n; r += MR)
        outer_tile<MR, C>(a + r * lda, lda, b, ldb, k, c + r * ldc, ldc, add);
    for (; r < n; ++r) outer_tile<1, C>(a + r * lda, lda, b, ldb, k, c + r * ldc, ldc, add);
}

// n rows, `lanes` columns (a multiple of W; c and b are padded to it).
inline void outer(const float* a, int64_t lda, int64_t n, const float* b, int64_t ldb, int64_t k,
                  int64_t lanes, float* c, int64_t ldc, bool add) {
    int64_t j = 0;
    for (; j + 4 * W <= lanes; j += 4 * W) outer_rows<4>(a, lda, n, b + j, ldb, k, c + j, ldc, add);
    for (; j < lanes; j += W) outer_rows<1>(a, lda, n, b + j, ldb, k, c + j, ldc, add);
}

template <class TQ, class TK>
struct Attention {
    const AttentionArgs& a;
    int64_t group, dim, lanes, tokens_per_block;  // lanes: dim rounded up to whole vectors

    explicit Attention(const AttentionArgs& args)
        : a(args),
          group(args.num_heads / args.num_kv_heads),
          dim(args.head_dim),
          lanes((args.head_dim + W - 1) / W * W),
          tokens_per_block(kQueryRows / group > 0 ? kQueryRows / group : 1) {}

    int64_t state_floats() const { return kQueryRows * (lanes + 2); }
    int64_t worker_floats() const {
        return kQueryRows * (lanes + kTile) + kTile * 2 * lanes + 2 * state_floats();
    }

    RowState state_at(float* at) const { return {at, at + kQueryRows, at + 2 * kQueryRows}; }

    struct Buffers {
        float *q, *scores, *keys, *values;
        RowState part, whole;
    };

    Buffers buffers(float* at) const {
        Buffers b;
        b.q = at;
        b.scores = b.q + kQueryRows * lanes;
        b.keys = b.scores + kQueryRows * kTile;
        b.values = b.keys + kTile * lanes;
        b.part = state_at(b.values + kTile * lanes);
        b.whole = state_at(b.values + kTile * lanes + state_floats());
        return b;
    }

    int64_t block_count(int64_t seq) const {
        const int64_t n = a.query_start_loc[seq + 1] - a.query_start_loc[seq];
        return blocks(n, tokens_per_block);
    }

    QueryBlock block_at(int64_t seq, int64_t kv_head, int64_t index) const {
        const int64_t begin = a.query_start_loc[seq], n = a.query_start_loc[seq + 1] - begin;
        const int64_t skip = index * tokens_per_block;
        const int64_t tokens = smaller(tokens_per_block, n - skip);
        const int64_t position = a.seq_lens[seq] - n + skip;
        return {seq,          kv_head,
                begin + skip, tokens * group,
                position,     blocks(position + tokens, kSuper)};
    }

    void load_queries(const QueryBlock& block, float* q) const {
        for (int64_t r = 0; r < block.rows; ++r) {
            const int64_t token = block.first_token + r / group;
            const int64_t head = block.kv_head * group + r % group;
            const TQ* from = static_cast<const TQ*>(a.q) + (token * a.num_heads + head) * dim;
            for_vectors(dim, [&](int64_t i, int64_t n) {
                store(q + r * lanes + i, load_some(from + i, n));
            });
        }
    }

    // Widens a tile's n keys, transposed ([D, kTile]), and values ([n, lanes]); stored tokens only.
    void load_tile(const QueryBlock& block, int64_t start, int64_t n, const Buffers& b) const {
        const int32_t* table = a.page_table + block.seq * a.page_table_stride;
        for (int64_t j = 0; j < n; ++j) {
            const int64_t page = table[(start + j) / a.page_size];
            const int64_t slot = (start + j) % a.page_size;
            const TK* k = static_cast<const TK*>(a.k) + page * a.k_page_stride +
                          block.kv_head * a.k_head_stride + slot * a.k_slot_stride;
            const TK* v = static_cast<const TK*>(a.v) + page * a.v_page_stride +
                          block.kv_head * a.v_head_stride + slot * a.v_slot_stride;
            float key[W];
            for_vectors(dim, [&](int64_t i, int64_t count) {
                store(key, load_some(k + i, count));
                for (int64_t l = 0; l < count; ++l) b.keys[(i + l) * kTile + j] = key[l];
                store(b.values + j * lanes + i, load_some(v + i, count));
            });
        }
        for (int64_t j = n; j < kTile; ++j)
            for (int64_t i = 0; i < dim; ++i) b.keys[i * kTile + j] = 0.0f;
    }

    // Takes one tile into a row's state. scores: this row's, unscaled; valid: how many count.
    void soften_row(float* scores, int64_t valid, bool fresh, int64_t row, RowState s) const {
        const F scale = set1(a.scale);
        F top = set1(-__builtin_inff());
        for (int64_t j = 0; j < kTile; j += W) {
            const int64_t n = valid - j < 0 ? 0 : smaller(W, valid - j);
            const F x = keep_n(load(scores + j) * scale, n, -__builtin_inff());
            store(scores + j, x);
            top = max(top, x);
        }
        const float before = fresh ? -__builtin_inff() : s.highest[row];
        const float here = hmax(top);
        const float highest = before > here ? before : here;
        F total = zero();
        for (int64_t j = 0; j < kTile; j += W) {
            const F p = exp(load(scores + j) - set1(highest));
            store(scores + j, p);
            total = total + p;
        }
        float* acc = s.acc + row * lanes;
        if (fresh) {
            s.sum[row] = hsum(total);
            for (int64_t i = 0; i < lanes; i += W) store(acc + i, zero());
        } else {
            const F keep = exp(set1(before - highest));
            float factor[W];
            store(factor, keep);
            s.sum[row] = s.sum[row] * factor[0] + hsum(total);
            for (int64_t i = 0; i < lanes; i += W) store(acc + i, load(acc + i) * keep);
        }
        s.highest[row] = highest;
    }

    void take_tile(const QueryBlock& block, int64_t start, bool fresh, const Buffers& b) const {
        const int64_t last = block.first_position + block.rows / group - 1;
        load_tile(block, start, smaller(kTile, last + 1 - start), b);
        // Rows before `first` end before this tile.
        const int64_t skipped = start - block.first_position;
        const int64_t first = skipped > 0 ? skipped * group : 0;
        outer(b.q + first * lanes, lanes, block.rows - first, b.keys, kTile, dim, kTile,
              b.scores + first * kTile, kTile, false);
        for (int64_t r = first; r < block.rows;) {
            const int64_t valid = smaller(kTile, block.first_position + r / group + 1 - start);
            int64_t n = 0;  // rows from r on that see as many positions
            for (; r + n < block.rows; ++n) {
                const int64_t theirs = block.first_position + (r + n) / group + 1 - start;
                if (smaller(kTile, theirs) != valid) break;
                soften_row(b.scores + (r + n) * kTile, valid, fresh, r + n, b.part);
            }
            outer(b.scores + r * kTile, kTile, n, b.values, lanes, valid, lanes,
                  b.part.acc + r * lanes, lanes, true);
            r += n;
        }
    }

    // The state of one super-tile for the rows that reach it; returns the first such row.
    int64_t take_super(const QueryBlock& block, int64_t super, const Buffers& b) const {
        const int64_t end = block.first_position + block.rows / group;
        const int64_t stop = smaller(end, (super + 1) * kSuper);
        for (int64_t start = super * kSuper; start < stop; start += kTile)
            take_tile(block, start, start == super * kSuper, b);
        const int64_t skipped = super * kSuper - block.first_position;
        return skipped > 0 ? skipped * group : 0;
    }

    // whole <- whole merged with the next super-tile's state, for rows from `first` on.
    void merge(const RowState& part, int64_t first, int64_t rows, bool start,
               const RowState& whole) const {
        for (int64_t r = first; r < rows; ++r) {
            float* acc = whole.acc + r * lanes;
            const float* more = part.acc + r * lanes;
            if (start) {
                whole.highest[r] = part.highest[r];
                whole.sum[r] = part.sum[r];
                for (int64_t i = 0; i < lanes; i += W) store(acc + i, load(more + i));
                continue;
            }
            const float before = whole.highest[r], here = part.highest[r];
            const float highest = before > here ? before : here;
            float mine[W], theirs[W];
            const F keep = exp(set1(before - highest)), take = exp(set1(here - highest));
            store(mine, keep);
            store(theirs, take);
            whole.highest[r] = highest;
            whole.sum[r] = whole.sum[r] * mine[0] + part.sum[r] * theirs[0];
            for (int64_t i = 0; i < lanes; i += W)
                store(acc + i, fma(load(more + i), take, load(acc + i) * keep));
        }
    }

    void write(const QueryBlock& block, const RowState& s) const {
        for (int64_t r = 0; r < block.rows; ++r) {
            const int64_t token = block.first_token + r / group;
            const int64_t head = block.kv_head * group + r % group;
            TQ* to = static_cast<TQ*>(a.out) + (token * a.num_heads + head) * dim;
            const F sum = set1(s.sum[r]);
            for_vectors(dim, [&](int64_t i, int64_t n) {
                store_some(to + i, load(s.acc + r * lanes + i) / sum, n);
            });
        }
    }

    void run_block(const QueryBlock& block, const Buffers& b) const {
        load_queries(block, b.q);
        for (int64_t super = 0; super < block.supers; ++super) {
            const int64_t first = take_super(block, super, b);
            merge(b.part, first, block.rows, super == 0, b.whole);
        }
        write(block, b.whole);
    }
};

// One unit of work: a block of queries, or one of its super-tiles when `slot` names a place for
// its state.
struct AttentionWork {
    QueryBlock block;
    int64_t super;
    int64_t slot;
};

template <class TQ, class TK>
Status paged_attention_of(const AttentionArgs& args) {
    const Attention<TQ, TK> op(args);
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
            op.load_queries(work[i].block, b.q);
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
                const int64_t skipped = super * kSuper - block.first_position;
                op.merge(state(work[i + super].slot), skipped > 0 ? skipped * op.group : 0,
                         block.rows, super == 0, b.whole);
            }
            op.write(block, b.whole);
        },
        workers);
    return kOk;
}

Status paged_attention(const AttentionArgs& a) {
    Status status = kOk;
    with_dtype(a.q_dtype, [&](auto* q) {
        with_dtype(a.kv_dtype, [&](auto* k) {
            status = paged_attention_of<pointee<decltype(q)>, pointee<decltype(k)>>(a);
        });
    });
    return status;
}
