// One pass over a row: its largest logit, whether it is finite, and the maxima of small groups of
// tokens, by which every later pass skips what can't matter.

constexpr int64_t kBlock = 1024;  // tokens; lane j of a block's maxima covers every W-th token

inline int64_t blocks_of(int64_t vocab) { return (vocab + kBlock - 1) / kBlock; }

// A row as it is read: logits, and the grammar's bits where there are any.
struct Logits {
    const float* x;
    const uint8_t* allowed;  // null: every token
    int64_t vocab;

    // Tokens i to i + W - 1, i a multiple of W; -inf beyond the vocabulary.
    F raw(int64_t i) const {
        if (i + W <= vocab) return load(x + i);
        return keep_n(load_n(x + i, vocab - i), vocab - i, -kInfinity);
    }
    F at(int64_t i) const {
        const F v = raw(i);
        return allowed == nullptr ? v : keep_bits(v, allowed_bits(i), -kInfinity);
    }

  private:
    uint32_t allowed_bits(int64_t i) const {
        uint32_t bits = allowed[i / 8];
        if (W == 16 && i + 8 < vocab) bits |= static_cast<uint32_t>(allowed[i / 8 + 1]) << 8;
        return bits;
    }
};

// Calls fn(part, first block, end block) for each of `parts` shares of the blocks.
template <class Fn>
inline void for_parts(int64_t parts, int64_t blocks, Fn&& fn) {
    if (parts == 1)
        fn(0, 0, blocks);
    else
        parallel(parts,
                 [&](int64_t p, int) { fn(p, blocks * p / parts, blocks * (p + 1) / parts); });
}

constexpr int64_t kMaxParts = 64;

struct Scanned {
    float largest = -kInfinity;
    int64_t forbidden = 0;  // -inf among the logits themselves, the grammar aside
    bool odd = false;       // a NaN or +inf
    void add(const Scanned& s) {
        largest = s.largest > largest ? s.largest : largest;
        forbidden += s.forbidden;
        odd |= s.odd;
    }
};

// The slow part of scan, for blocks that hold something that is not finite.
inline void count_odd(const Logits& row, int64_t begin, int64_t end, Scanned& out) {
    for (int64_t i = begin; i < end; ++i) {
        if (row.x[i] == -kInfinity)
            ++out.forbidden;
        else
            out.odd |= !(row.x[i] - row.x[i] == 0.0f);
    }
}

template <bool kMasked>
inline Scanned scan_blocks(const Logits& row, int64_t first, int64_t end, float* maxima) {
    Scanned out;
    F largest = set1(-kInfinity);
    for (int64_t b = first; b < end; ++b) {
        const int64_t begin = b * kBlock;
        const int64_t stop = begin + kBlock < row.vocab ? begin + kBlock : row.vocab;
        F best = set1(-kInfinity);
        uint32_t odd = 0;
        int64_t i = begin;
        for (; i + W <= stop; i += W) {
            const F x = row.raw(i);
            odd |= odd_bits(x);
            best = max(kMasked ? row.at(i) : x, best);
        }
        if (i < stop) {
            odd |= odd_bits(row.raw(i)) & first_bits(stop - i);
            best = max(row.at(i), best);
        }
        store(maxima + b * W, best);
        largest = max(best, largest);
        if (odd) count_odd(row, begin, stop, out);
    }
    float lanes[W];
    store(lanes, largest);
    for (const float x : lanes) out.largest = x > out.largest ? x : out.largest;
    return out;
}

// maxima: [blocks, W].
inline Scanned scan(const Logits& row, int64_t parts, float* maxima) {
    Scanned found[kMaxParts];
    for_parts(parts, blocks_of(row.vocab), [&](int64_t p, int64_t first, int64_t end) {
        found[p] = row.allowed == nullptr ? scan_blocks<false>(row, first, end, maxima)
                                          : scan_blocks<true>(row, first, end, maxima);
    });
    for (int64_t p = 1; p < parts; ++p) found[0].add(found[p]);
    return found[0];
}

// Calls fn(i, bits of the tokens >= bound) for the vectors of the blocks that have any, in order,
// until fn returns false.
template <class Fn>
inline void for_reaching(const Logits& row, const float* maxima, int64_t first, int64_t end,
                         float bound, Fn&& fn) {
    const F least = set1(bound);
    for (int64_t b = first; b < end; ++b) {
        if (!ge_bits(load(maxima + b * W), least)) continue;
        const int64_t stop = b * kBlock + kBlock < row.vocab ? b * kBlock + kBlock : row.vocab;
        for (int64_t i = b * kBlock; i < stop; i += W) {
            const F x = row.at(i);
            const uint32_t bits = ge_bits(x, least);
            if (bits && !fn(i, x, bits)) return;
        }
    }
}

// The id of the nth (from 1) token whose logit equals x.
inline int64_t nth_equal(const Logits& row, const float* maxima, float x, int64_t nth) {
    int64_t id = -1;
    for_reaching(row, maxima, 0, blocks_of(row.vocab), x, [&](int64_t i, F v, uint32_t) {
        for (uint32_t bits = eq_bits(v, set1(x)); bits; bits &= bits - 1)
            if (--nth == 0) {
                id = i + __builtin_ctz(bits);
                return false;
            }
        return true;
    });
    return id;
}

// The logits >= bound in the order of their ids. Returns how many.
inline int64_t collect(const Logits& row, const float* maxima, int64_t parts, float bound,
                       float* out) {
    int64_t counts[kMaxParts], starts[kMaxParts];
    for_parts(parts, blocks_of(row.vocab), [&](int64_t p, int64_t first, int64_t end) {
        float* at = out + first * kBlock;
        for_reaching(row, maxima, first, end, bound, [&](int64_t, F x, uint32_t bits) {
            compress(at, x, bits);
            at += __builtin_popcount(bits);
            return true;
        });
        starts[p] = first * kBlock;
        counts[p] = at - out - starts[p];
    });
    int64_t n = counts[0];
    for (int64_t p = 1; p < parts; ++p) {
        std::memmove(out + n, out + starts[p], static_cast<size_t>(counts[p]) * sizeof(float));
        n += counts[p];
    }
    return n;
}
