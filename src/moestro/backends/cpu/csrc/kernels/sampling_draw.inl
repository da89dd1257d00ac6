// The draw: the largest y + noise among the kept tokens. Nearly every token is ruled out by an
// estimate from above that takes the upper half of its noise bits and no logarithm.

constexpr double kLog2E = 1.4426950408889634;
constexpr double kMaxNoise = 36.75;
// Above the error of estimated exponents that matter (below 50 in size): fp32 rounding.
constexpr double kMargin = 1e-3;

struct Winner {
    double score = -__builtin_inf();
    int64_t id = -1;
    void add(const Winner& w) {
        if (w.id < 0) return;
        if (id < 0 || w.score > score || (w.score == score && w.id < id)) *this = w;
    }
};

// The estimate: a token wins only if its noise reaches d = best - y. As -log u >= 1 - u, noise
// -log(-log u) is at most -log(1 - u); so 1 - u must be at most e^-d. The 31 upper bits of 1 - u,
// as a number, are compared with 2^31 e^-d, whose logarithm is linear in the logit; the power of
// two is estimated from above by a line between whole exponents, made by bits.
struct Bar {
    float slope, offset;  // of 2^23 (log2(2^31 e^-d) + 127) over logit - largest
    float reach;          // logits below can't win with the largest noise there is
};

inline Bar bar_of(const Winner& best, float largest, double temperature) {
    constexpr double unit = 8388608.0;
    const double inverse = 1.0 / temperature < 1e30 ? 1.0 / temperature : 1e30;
    const double base = best.score - kMargin;
    const double reach = static_cast<double>(largest) +
                         (base - kMaxNoise) * temperature * (1.0 + 1e-6) -
                         1e-6 * (largest < 0 ? -largest : largest);
    return {static_cast<float>(inverse * kLog2E * unit),
            static_cast<float>((31.0 + 127.0 - base * kLog2E) * unit),
            reach > kLowest ? static_cast<float>(reach) : kLowest};
}

// Lanes of tokens i to i + W - 1 that may win.
inline uint32_t contenders(F x, int64_t i, float largest, const Bar& bar, uint64_t key) {
    const F exponent = fma(x - set1(largest), set1(bar.slope), set1(bar.offset));
    const F most = truncated_as_float(max(exponent, zero()));
    const VI words = noise_words(key, i);
    const VI gap = (~words >> 1) & 0x7fffffff;
    return ge_bits(most, from_int(gap));
}

inline Winner draw_blocks(const Selection& s, const Bound& kept, uint64_t key, Winner best,
                          int64_t first, int64_t end) {
    Bar bar = bar_of(best, s.largest, s.temperature);
    for (int64_t b = first; b < end; ++b) {
        const float least = kept.x > bar.reach ? kept.x : bar.reach;
        for_reaching(s.row, s.maxima, b, b + 1, least, [&](int64_t i, F x, uint32_t bits) {
            if (i + W > kept.last) {
                const int64_t n = kept.last + 1 - i;  // of these, ties are kept
                bits &= ~(eq_bits(x, set1(kept.x)) & ~(n > 0 ? first_bits(n) : 0u));
                if (!bits) return true;
            }
            bits &= contenders(x, i, s.largest, bar, key);
            if (!bits) return true;
            float lanes[W];
            store(lanes, x);
            const double before = best.score;
            for (; bits; bits &= bits - 1) {
                const int j = __builtin_ctz(bits);
                best.add({scaled(lanes[j], s.largest, s.temperature) + gumbel(key, i + j), i + j});
            }
            if (best.score > before) bar = bar_of(best, s.largest, s.temperature);
            return true;
        });
    }
    return best;
}

// argmax: the first token of the ranking, which is always kept.
inline int64_t draw(const Selection& s, const Bound& kept, uint64_t key, int64_t argmax) {
    Winner found[kMaxParts];
    const Winner start = {0.0 + gumbel(key, argmax), argmax};
    for_parts(s.parts, blocks_of(s.row.vocab), [&](int64_t p, int64_t first, int64_t end) {
        found[p] = draw_blocks(s, kept, key, start, first, end);
    });
    for (int64_t p = 1; p < s.parts; ++p) found[0].add(found[p]);
    return found[0].id;
}
