// log_softmax of raw logits in doubles. Sums: lane by lane within blocks of fixed tokens, lanes in
// order, blocks in order, whoever computes them.

inline double sum_block(const Logits& row, int64_t begin, float largest) {
    const int64_t stop = begin + kBlock < row.vocab ? begin + kBlock : row.vocab;
    const VD top = setd(largest);
    VD sum = {}, x[kChains], e[kChains];
    float last[kChains * H];
    for (int64_t i = begin; i < stop; i += kChains * H) {
        const float* from = row.x + i;
        if (i + kChains * H > stop) {
            for (int j = 0; j < kChains * H; ++j) last[j] = i + j < stop ? from[j] : -kInfinity;
            from = last;
        }
        for (int c = 0; c < kChains; ++c) x[c] = load_doubles(from + c * H) - top;
        exp_doubles(x, e);
        sum += (e[0] + e[1]) + (e[2] + e[3]);
    }
    double total = 0.0;
    for (int j = 0; j < H; ++j) total += sum[j];
    return total;
}

// sums: [blocks].
inline double log_of_sum(const Logits& row, float largest, int64_t parts, double* sums) {
    const int64_t blocks = blocks_of(row.vocab);
    for_parts(parts, blocks, [&](int64_t, int64_t first, int64_t end) {
        for (int64_t b = first; b < end; ++b) sums[b] = sum_block(row, b * kBlock, largest);
    });
    double total = 0.0;
    for (int64_t b = 0; b < blocks; ++b) total += sums[b];
    return log_number(total);
}

// 1 + the tokens ahead of `token` in the ranking.
inline int64_t rank_of(const Logits& row, const float* maxima, int64_t parts, int64_t token) {
    int64_t ahead[kMaxParts];
    const float x = row.x[token];
    for_parts(parts, blocks_of(row.vocab), [&](int64_t p, int64_t first, int64_t end) {
        int64_t count = 0;
        for_reaching(row, maxima, first, end, x, [&](int64_t i, F v, uint32_t bits) {
            if (i + W > token) {
                const uint32_t earlier = token > i ? first_bits(token - i) : 0u;
                bits &= ~eq_bits(v, set1(x)) | earlier;
            }
            count += __builtin_popcount(bits);
            return true;
        });
        ahead[p] = count;
    });
    int64_t rank = 1;
    for (int64_t p = 0; p < parts; ++p) rank += ahead[p];
    return rank;
}

// Sorts ids by (falling logit, rising id). A heap sort: no worst case.
inline void sort_ranking(const float* x, int64_t* ids, int64_t n) {
    const auto ahead = [x](int64_t a, int64_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
    const auto sink = [&](int64_t i, int64_t size) {
        const int64_t id = ids[i];
        for (int64_t child; (child = 2 * i + 1) < size; i = child) {
            if (child + 1 < size && ahead(ids[child], ids[child + 1])) ++child;
            if (!ahead(id, ids[child])) break;
            ids[i] = ids[child];
        }
        ids[i] = id;
    };
    for (int64_t i = n / 2; i-- > 0;) sink(i, n);
    for (int64_t size = n; size-- > 1;) {
        const int64_t last = ids[0];
        ids[0] = ids[size], ids[size] = last;
        sink(0, size);
    }
}

// The first `count` tokens of the ranking into ids.
inline void first_of_ranking(const Logits& row, const float* maxima, int64_t count,
                             const Selection& s, int64_t* ids) {
    if (count == 0) return;
    const int64_t blocks = blocks_of(row.vocab);
    const float bound = reached_by(maxima, blocks * W, count, s.spare, s.buckets);
    int64_t* order = s.weights;
    int64_t n = 0, equal = 0;
    for_reaching(row, maxima, 0, blocks, bound, [&](int64_t i, F x, uint32_t bits) {
        const uint32_t ties = eq_bits(x, set1(bound));
        for (; bits; bits &= bits - 1) {
            const int j = __builtin_ctz(bits);
            if (ties >> j & 1u && ++equal > count) continue;
            order[n++] = i + j;
        }
        return true;
    });
    sort_ranking(row.x, order, n);
    std::memcpy(ids, order, static_cast<size_t>(count) * sizeof(int64_t));
}

// Where the log probabilities of one row go: [1 + top] each.
struct RowLogprobs {
    int64_t* ids;
    double* logprobs;
    int64_t* ranks;
};

// The most likely tokens, in columns 1 and on. Returns the logarithm of the sum.
inline double fill_top(const Logits& row, float largest, const float* maxima, int64_t top,
                       const Selection& s, double* sums, const RowLogprobs& out) {
    const double total = log_of_sum(row, largest, s.parts, sums);
    first_of_ranking(row, maxima, top, s, out.ids + 1);
    for (int64_t j = 1; j <= top; ++j) {
        out.logprobs[j] = (static_cast<double>(row.x[out.ids[j]]) - largest) - total;
        out.ranks[j] = j;
    }
    return total;
}

inline void fill_token(const Logits& row, float largest, const float* maxima, int64_t parts,
                       int64_t token, double total, const RowLogprobs& out) {
    out.ids[0] = token;
    out.logprobs[0] = (static_cast<double>(row.x[token]) - largest) - total;
    out.ranks[0] = rank_of(row, maxima, parts, token);
}
