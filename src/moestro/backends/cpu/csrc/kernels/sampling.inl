// A row from logits to token, and the ops.
//
// Rows are shared out over the threads; of a few rows, the blocks of each are. A row's result is
// its own either way: selections are exact, the winner does not depend on who finds it, and the
// only sums of fractions run in a fixed order.

// One row's buffers. maxima of the logits as they came, of the edited ones, and room for one more.
struct Scratch {
    float* maxima[3];  // [blocks, W]
    double* sums;      // [blocks]
    float* few;        // [V + kGroup]
    int64_t* weights;  // [V + kGroup]
    int64_t* buckets;  // [kBuckets]
    float* before;     // [edits]

    static int64_t bytes(int64_t vocab, int64_t edits) {
        const int64_t n = blocks_of(vocab);
        return 3 * lines(n * W * 4) + lines(n * 8) + lines((vocab + kGroup) * 4) +
               lines((vocab + kGroup) * 8) + lines(kBuckets * 8) + lines(edits * 4);
    }

    Scratch(char* at, int64_t vocab, int64_t edits) {
        const int64_t n = blocks_of(vocab);
        const auto take = [&at](int64_t size) {
            char* given = at;
            at += lines(size);
            return given;
        };
        for (float*& m : maxima) m = reinterpret_cast<float*>(take(n * W * 4));
        sums = reinterpret_cast<double*>(take(n * 8));
        few = reinterpret_cast<float*>(take((vocab + kGroup) * 4));
        weights = reinterpret_cast<int64_t*>(take((vocab + kGroup) * 8));
        buckets = reinterpret_cast<int64_t*>(take(kBuckets * 8));
        before = reinterpret_cast<float*>(take(edits * 4));
    }
};

// Puts biases and penalties into a row, and takes them out again to the bit.
class Edits {
  public:
    Edits(const SampleArgs& a, int64_t row, float* x, float* before)
        : a_(a), row_(row), x_(x), before_(before) {
        if (a.bias_sizes) biases_ = a.bias_sizes[row], bias_start_ = a.bias_starts[row];
        if (a.count_sizes) counts_ = a.count_sizes[row], count_start_ = a.count_starts[row];
    }

    bool any() const { return biases_ + counts_ > 0; }

    // Notes whether all of the edited logits were finite, and how many of them are forbidden now.
    void apply() {
        for (int64_t i = 0; i < biases_; ++i) {
            fetch(a_.bias_ids + bias_start_, i, biases_);
            float& x = x_[a_.bias_ids[bias_start_ + i]];
            before_[i] = x;
            finite &= x - x == 0.0f;
            x += a_.bias_values[bias_start_ + i];
            forbidden += x == -kInfinity;
        }
        for (int64_t i = 0; i < counts_; ++i) {
            fetch(a_.count_ids + count_start_, i, counts_);
            float& x = x_[a_.count_ids[count_start_ + i]];
            before_[biases_ + i] = x;
            if (x == -kInfinity) continue;  // by a bias, or not finite: seen by the scan
            finite &= x - x == 0.0f;
            x = penalised(x, a_.counts[count_start_ + i]);
        }
    }

    void undo() {
        for (int64_t i = counts_; i-- > 0;)
            x_[a_.count_ids[count_start_ + i]] = before_[biases_ + i];
        for (int64_t i = biases_; i-- > 0;) x_[a_.bias_ids[bias_start_ + i]] = before_[i];
    }

    bool finite = true;
    int64_t forbidden = 0;

  private:
    // The row may still lie in memory, and the ids are anywhere.
    void fetch(const int64_t* ids, int64_t i, int64_t n) const {
        constexpr int64_t ahead = 24;
        if (i + ahead < n) __builtin_prefetch(x_ + ids[i + ahead], 1);
    }

    float penalised(float given, int64_t count) const {
        const double repetition = a_.repetition[row_];
        double x = static_cast<double>(given);
        x = x > 0 ? x / repetition : x * repetition;
        x = x - a_.frequency[row_] * static_cast<double>(count);
        x = x - a_.presence[row_] * (count > 0 ? 1.0 : 0.0);
        constexpr double limit = 3.4028234663852886e38;
        x = x < -limit ? -limit : x;
        return static_cast<float>(x > limit ? limit : x);
    }

    const SampleArgs& a_;
    int64_t row_;
    float *x_, *before_;
    int64_t biases_ = 0, counts_ = 0, bias_start_ = 0, count_start_ = 0;
};

// Which tokens top_k, min_p and top_p leave.
inline Bound kept_by(const Selection& s, int64_t top_k, double top_p, double min_p) {
    Bound kept;
    if (top_k > 0) kept = first_k(s, top_k);
    if (min_p > 0.0) {
        const float x = lowest_reaching(log_number(min_p), s.largest, s.temperature);
        if (x > kept.x) kept = {x, INT64_MAX, INT64_MAX};
    }
    if (top_p < 1.0) kept = first_mass(s, kept, top_p);
    return kept;
}

constexpr int64_t kNoToken = -1;

// The token of row `r`, whose logits (edited by now) are `row`.
inline int64_t token_of(const SampleArgs& a, int64_t r, const Logits& row, const Scanned& found,
                        const float* maxima, const Scratch& scratch, int64_t parts) {
    if (found.odd || found.largest == -kInfinity) return kNoToken;
    const int64_t argmax = nth_equal(row, maxima, found.largest, 1);
    if (a.temperature[r] == 0.0) return argmax;
    const Selection s = {row,         maxima,          found.largest,     a.temperature[r], parts,
                         scratch.few, scratch.weights, scratch.maxima[2], scratch.buckets};
    const Bound kept = kept_by(s, a.top_k[r], a.top_p[r], a.min_p[r]);
    const uint64_t key = noise_key(a.seed[r], a.sample_index[r], a.position[r]);
    return draw(s, kept, key, argmax);
}

// Columns [0, count) of a row that has no log probabilities.
inline void fill_none(const RowLogprobs& out, int64_t count) {
    for (int64_t j = 0; j < count; ++j) {
        out.ids[j] = kNoToken;
        out.logprobs[j] = __builtin_nan("");
        out.ranks[j] = 0;
    }
}

inline void sample_row(const SampleArgs& a, int64_t r, int64_t parts, const Scratch& scratch) {
    float* x = a.logits + r * a.row_stride;
    const int64_t top = a.num_top ? a.num_top[r] : -1;
    const int64_t masked = a.mask_rows ? a.mask_rows[r] : -1;
    const Logits raw = {x, nullptr, a.vocab};
    const Logits seen = {x, masked < 0 ? nullptr : a.mask_bits + masked * a.mask_stride, a.vocab};
    Edits edits(a, r, x, scratch.before);
    const bool same = masked < 0 && !edits.any();
    const RowLogprobs out = {a.logprob_ids + r * a.logprob_stride,
                             a.logprobs + r * a.logprob_stride, a.ranks + r * a.logprob_stride};
    fill_none(out, a.logprob_stride);
    Scanned found;
    double total = 0.0;
    float largest = 0.0f;
    bool finite = true;
    if (top >= 0 || same) {
        found = scan(raw, parts, scratch.maxima[0]);
        finite = !found.odd && found.forbidden == 0;
        largest = found.largest;
    }
    if (top >= 0 && finite) {
        const Selection s = {raw,
                             scratch.maxima[0],
                             largest,
                             1.0,
                             parts,
                             scratch.few,
                             scratch.weights,
                             scratch.maxima[2],
                             scratch.buckets};
        total =
            fill_top(raw, largest, scratch.maxima[0], smaller(top, a.vocab), s, scratch.sums, out);
    }
    int64_t token = kNoToken;
    if (same) {
        if (finite || !a.finite)
            token = token_of(a, r, raw, found, scratch.maxima[0], scratch, parts);
    } else if (finite) {
        edits.apply();
        found = scan(seen, parts, scratch.maxima[1]);
        finite = edits.finite && !found.odd && found.forbidden == edits.forbidden;
        if (finite) token = token_of(a, r, seen, found, scratch.maxima[1], scratch, parts);
        edits.undo();
    }
    if (a.finite) a.finite[r] = finite;
    a.token_ids[r] = token;
    if (top < 0) return;
    if (token == kNoToken)
        fill_none(out, a.logprob_stride);
    else
        fill_token(raw, largest, scratch.maxima[0], parts, token, total, out);
}

inline void score_row(const LogprobArgs& a, int64_t r, int64_t parts, const Scratch& scratch) {
    const Logits row = {a.logits + r * a.row_stride, nullptr, a.vocab};
    const RowLogprobs out = {a.ids + r * (1 + a.num_top), a.logprobs + r * (1 + a.num_top),
                             a.ranks + r * (1 + a.num_top)};
    const float* maxima = scratch.maxima[0];
    const Scanned found = scan(row, parts, scratch.maxima[0]);
    if (found.odd || found.forbidden > 0) {
        fill_none(out, 1 + a.num_top);
        out.ids[0] = a.token_ids[r];
        return;
    }
    const Selection s = {row,
                         maxima,
                         found.largest,
                         1.0,
                         parts,
                         scratch.few,
                         scratch.weights,
                         scratch.maxima[2],
                         scratch.buckets};
    const double total = fill_top(row, found.largest, maxima, a.num_top, s, scratch.sums, out);
    fill_token(row, found.largest, maxima, parts, a.token_ids[r], total, out);
}

// Shares out rows, or the blocks of each when they are few. one(row, parts, scratch).
template <class One>
inline Status for_sampled_rows(int64_t rows, int64_t vocab, int64_t edits, One&& one) {
    const int64_t workers = num_workers();
    const int64_t bytes = Scratch::bytes(vocab, edits);
    const int64_t parts = smaller(smaller(workers, blocks_of(vocab)), kMaxParts);
    const bool split = parts > 1 && rows % workers != 0 && rows < 4 * workers && vocab >= 16384;
    const int64_t users = split ? 1 : smaller(workers, rows);
    char* memory = static_cast<char*>(call_scratch(static_cast<size_t>(bytes * users)));
    if (memory == nullptr) return kNoMemory;
    if (split) {
        const Scratch scratch(memory, vocab, edits);
        for (int64_t r = 0; r < rows; ++r) one(r, parts, scratch);
        return kOk;
    }
    parallel(
        rows,
        [&](int64_t r, int worker) {
            one(r, int64_t{1}, Scratch(memory + worker * bytes, vocab, edits));
        },
        static_cast<int>(users));
    return kOk;
}

Status sample(const SampleArgs& a) {
    int64_t edits = 0;
    for (int64_t r = 0; r < a.num_rows; ++r) {
        const int64_t n =
            (a.bias_sizes ? a.bias_sizes[r] : 0) + (a.count_sizes ? a.count_sizes[r] : 0);
        edits = n > edits ? n : edits;
    }
    return for_sampled_rows(a.num_rows, a.vocab, edits,
                            [&a](int64_t r, int64_t parts, const Scratch& scratch) {
                                sample_row(a, r, parts, scratch);
                            });
}

Status token_logprobs(const LogprobArgs& a) {
    return for_sampled_rows(a.num_rows, a.vocab, 0,
                            [&a](int64_t r, int64_t parts, const Scratch& scratch) {
                                score_row(a, r, parts, scratch);
                            });
}
