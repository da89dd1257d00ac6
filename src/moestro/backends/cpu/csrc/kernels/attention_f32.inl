// Attention in fp32 for any element types: keys and values are widened tile by tile.

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

struct Attention : AttentionShape {
    int64_t lanes;  // dim rounded up to whole vectors

    explicit Attention(const AttentionArgs& args)
        : AttentionShape(args), lanes((args.head_dim + W - 1) / W * W) {}

    int64_t state_floats(int64_t rows) const { return rows * (lanes + 2); }
    int64_t worker_floats() const {
        return kQueryRows * (lanes + kTile) + kTile * 2 * lanes + 2 * state_floats(kQueryRows);
    }

    RowState state_at(float* at, int64_t rows) const { return {at, at + rows, at + 2 * rows}; }

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
        float* states = b.values + kTile * lanes;
        b.part = state_at(states, kQueryRows);
        b.whole = state_at(states + state_floats(kQueryRows), kQueryRows);
        return b;
    }

    void load_queries(const QueryBlock& block, const Buffers& b) const {
        with_dtype(a.q_dtype, [&](auto* type) {
            using T = pointee<decltype(type)>;
            for (int64_t r = 0; r < block.rows; ++r) {
                const T* from = static_cast<const T*>(a.q) + row_offset(block, r);
                for_vectors(dim, [&](int64_t i, int64_t n) {
                    store(b.q + r * lanes + i, load_some(from + i, n));
                });
            }
        });
    }

    // Widens a tile's n keys, transposed ([D, kTile]), and values ([n, lanes]). Only positions
    // that were stored are read.
    template <class T>
    void load_tile(const QueryBlock& block, int64_t start, int64_t n, const Buffers& b) const {
        const T *keys[kTile], *values[kTile];
        find_keys(block, start, n, keys);
        find_values(block, start, n, values);
        float k_scales[kTile] = {}, v_scales[kTile] = {};
        if (is_code<T>) find_scales(block, start, n, k_scales, v_scales);
        for (int64_t j = 0; j < kTile; j += W)
            for_vectors(dim, [&](int64_t i, int64_t count) {
                F in[W], out[W];
                for (int64_t l = 0; l < W; ++l)
                    in[l] = j + l < n ? read_row(keys[j + l] + i, count, k_scales[j + l]) : zero();
                transpose(in, out);
                for (int64_t l = 0; l < W; ++l) store(b.keys + (i + l) * kTile + j, out[l]);
            });
        for (int64_t j = 0; j < n; ++j)
            for_vectors(dim, [&](int64_t i, int64_t count) {
                store(b.values + j * lanes + i, read_row(values[j] + i, count, v_scales[j]));
            });
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
        const int64_t n = smaller(kTile, block.last_position + 1 - start);
        with_page_dtype(a.pages.dtype, [&](auto* type) {
            load_tile<pointee<decltype(type)>>(block, start, n, b);
        });
        const int64_t first = first_row(block, start);
        outer(b.q + first * lanes, lanes, block.rows - first, b.keys, kTile, dim, kTile,
              b.scores + first * kTile, kTile, false);
        int64_t valid = smaller(kTile, block.first_position + first / group + 1 - start);
        for (int64_t r = first; r < block.rows; ++valid) {
            // The rows of one token see the same positions; so do all once a token sees them all.
            const int64_t rows = valid == kTile ? block.rows - r : group;
            for (int64_t i = r; i < r + rows; ++i)
                soften_row(b.scores + i * kTile, valid, fresh, i, b.part);
            outer(b.scores + r * kTile, kTile, rows, b.values, lanes, valid, lanes,
                  b.part.acc + r * lanes, lanes, true);
            r += rows;
        }
    }

    // The state of one super-tile for the rows that reach it; returns the first such row.
    int64_t take_super(const QueryBlock& block, int64_t super, const Buffers& b) const {
        const int64_t stop = smaller(block.last_position + 1, (super + 1) * kSuper);
        for (int64_t start = super * kSuper; start < stop; start += kTile)
            take_tile(block, start, start == super * kSuper, b);
        return first_row(block, super * kSuper);
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
        with_dtype(a.q_dtype, [&](auto* type) {
            using T = pointee<decltype(type)>;
            for (int64_t r = 0; r < block.rows; ++r) {
                T* to = static_cast<T*>(a.out) + row_offset(block, r);
                const F sum = set1(s.sum[r]);
                for_vectors(dim, [&](int64_t i, int64_t n) {
                    store_some(to + i, load(s.acc + r * lanes + i) / sum, n);
                });
            }
        });
    }

    void run_block(const QueryBlock& block, const Buffers& b) const {
        load_queries(block, b);
        for (int64_t super = 0; super < block.supers; ++super) {
            const int64_t first = take_super(block, super, b);
            merge(b.part, first, block.rows, super == 0, b.whole);
        }
        write(block, b.whole);
    }
};
