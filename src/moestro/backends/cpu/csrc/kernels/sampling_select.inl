// Where a prefix of the ranking ends: by number of tokens (top_k), by ratio to the largest (min_p),
// by mass (top_p). Nothing is sorted; everything is exact.

constexpr int64_t kBuckets = 2048;
constexpr int kBucketBits = 11;

// The kept tokens: logit > x, or == x and id <= last. ties: how many are kept at x.
struct Bound {
    float x = kLowest;
    int64_t last = INT64_MAX;
    int64_t ties = INT64_MAX;
};

// A word that orders as the floats do; -0 as 0.
inline uint32_t key_of(float given) {
    const float x = given + 0.0f;
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

inline float float_of_key(uint32_t key) {
    const uint32_t bits = key >> 31 ? key & 0x7fffffffu : ~key;
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

inline double scaled(float x, double largest, double temperature) {
    return (static_cast<double>(x) - largest) / temperature;
}

// The lowest logit with y >= low, where y = (logit - largest) / temperature never falls as the
// logit grows.
inline float lowest_reaching(double low, float largest, double temperature) {
    uint32_t fails = key_of(kLowest), holds = key_of(largest);
    if (scaled(kLowest, largest, temperature) >= low) return kLowest;
    while (holds - fails > 1) {
        const uint32_t middle = fails + (holds - fails) / 2;
        if (scaled(float_of_key(middle), largest, temperature) >= low)
            holds = middle;
        else
            fails = middle;
    }
    return float_of_key(holds);
}

struct Crossing {
    float x;
    int64_t above;  // the weight of all that is larger than x
    int64_t equal;  // how many of the given logits equal x
};

inline Crossing cross_few(float* x, int64_t* weights, int64_t n, int64_t above, int64_t need) {
    for (int64_t i = 1; i < n; ++i)  // insertion sort, falling
        for (int64_t j = i; j > 0 && x[j] > x[j - 1]; --j) {
            const float larger = x[j];
            x[j] = x[j - 1], x[j - 1] = larger;
            if (!weights) continue;
            const int64_t its = weights[j];
            weights[j] = weights[j - 1], weights[j - 1] = its;
        }
    for (int64_t i = 0; i < n;) {
        int64_t end = i, weight = 0;
        for (; end < n && x[end] == x[i]; ++end) weight += weights ? weights[end] : 1;
        if (above + weight >= need) return {x[i], above, end - i};
        above += weight;
        i = end;
    }
    return {x[n - 1], above, 1};  // need is more than there is: not reached
}

// The largest x such that the given logits >= x weigh at least `need`; weights null: one each.
// Radix selection from the top, on keys. Overwrites x and weights.
inline Crossing cross(float* x, int64_t* weights, int64_t n, int64_t need, int64_t* buckets) {
    int64_t above = 0;
    for (;;) {
        if (n <= 32) return cross_few(x, weights, n, above, need);
        uint32_t low = ~0u, high = 0;
        for (int64_t i = 0; i < n; ++i) {
            const uint32_t key = key_of(x[i]);
            low = key < low ? key : low;
            high = key > high ? key : high;
        }
        if (low == high) return {x[0], above, n};
        const int width = 32 - __builtin_clz(high - low);
        const int shift = width > kBucketBits ? width - kBucketBits : 0;
        std::memset(buckets, 0, kBuckets * sizeof(int64_t));
        for (int64_t i = 0; i < n; ++i)
            buckets[(high - key_of(x[i])) >> shift] += weights ? weights[i] : 1;
        uint32_t hit = 0;
        while (hit + 1 < kBuckets && above + buckets[hit] < need) above += buckets[hit++];
        int64_t kept = 0;
        for (int64_t i = 0; i < n; ++i) {
            const float value = x[i];
            const int64_t weight = weights ? weights[i] : 1;
            if ((high - key_of(value)) >> shift != hit) continue;
            x[kept] = value;
            if (weights) weights[kept] = weight;
            ++kept;
        }
        n = kept;
    }
}

// A number that at least k of the row's tokens reach, and little more than k: the kth largest of
// the maxima of disjoint groups; the lowest number when there are too few groups.
inline float reached_by(const float* maxima, int64_t groups, int64_t k, float* spare,
                        int64_t* buckets) {
    if (k > groups) return kLowest;
    int64_t n = groups;
    const float* from = maxima;
    while (n > 256 && n >= 8 * k) {  // fewer, larger groups are as good for a small k
        const int64_t half = (n + 1) / 2;
        for (int64_t i = 0; i < n - half; ++i)
            spare[i] = from[i] > from[half + i] ? from[i] : from[half + i];
        if (half > n - half) spare[half - 1] = from[half - 1];
        from = spare;
        n = half;
    }
    if (from != spare) std::memcpy(spare, from, static_cast<size_t>(n) * sizeof(float));
    const float reached = cross(spare, nullptr, n, k, buckets).x;
    return reached > kLowest ? reached : kLowest;
}

// What the selections of one row share.
struct Selection {
    Logits row;
    const float* maxima;
    float largest;
    double temperature;
    int64_t parts;
    float* few;        // [V + kGroup]
    int64_t* weights;  // [V + kGroup]
    float* spare;      // [blocks, W]
    int64_t* buckets;  // [kBuckets]
};

inline Bound first_k(const Selection& s, int64_t k) {
    if (k >= s.row.vocab) return {};
    const int64_t groups = blocks_of(s.row.vocab) * W;
    const float bound = reached_by(s.maxima, groups, k, s.spare, s.buckets);
    const int64_t n = collect(s.row, s.maxima, s.parts, bound, s.few);
    if (n <= k && bound == kLowest) return {};  // no more than k are allowed
    const Crossing at = cross(s.few, nullptr, n, k, s.buckets);
    const int64_t ties = k - at.above;
    if (ties >= at.equal) return {at.x, INT64_MAX, at.equal};
    return {at.x, nth_equal(s.row, s.maxima, at.x, ties), ties};
}

constexpr int64_t kGroup = kChains * H;  // logits that are weighed together

// The masses of kGroup logits from p on.
inline void masses_of(const float* p, const Selection& s, VL* mass) {
    VD y[kChains];
    for (int c = 0; c < kChains; ++c) y[c] = load_doubles(p + c * H) - setd(s.largest);
    if (s.temperature != 1.0)
        for (int c = 0; c < kChains; ++c) y[c] = y[c] / setd(s.temperature);
    token_masses<kChains>(y, mass);
}

constexpr int kLevels = 7;

// A range of logits, [low, high), cut at falling levels: share l is what reaches from[l] but not
// from[l - 1]; the last share is the rest.
struct Cuts {
    float from[kLevels];
    float low, high;

    float low_of(int l) const { return l < kLevels && from[l] > low ? from[l] : low; }
    float high_of(int l) const { return l > 0 && from[l - 1] < high ? from[l - 1] : high; }
};

// The mass of n logits at p, by shares; p is padded.
inline void add_masses(const float* p, int64_t n, const Selection& s, const Cuts& cuts,
                       int64_t* shares) {
    VL sums[kLevels + 1] = {};
    VL mass[kChains];
    for (int64_t i = 0; i < n; i += kGroup) {
        masses_of(p + i, s, mass);
        for (int c = 0; c < kChains; ++c) {
            const VD x = load_doubles(p + i + c * H);
            for (int l = 0; l < kLevels; ++l) sums[l] += x >= setd(cuts.from[l]) ? mass[c] : VL{};
            sums[kLevels] += mass[c];
        }
    }
    int64_t before = 0;
    for (int l = 0; l <= kLevels; ++l) {
        const int64_t upto = total_of(sums[l]);
        shares[l] = upto - before;
        before = upto;
    }
}

inline void weigh(const float* p, int64_t n, const Selection& s, int64_t* weights) {
    VL mass[kChains];
    for (int64_t i = 0; i < n; i += kGroup) {
        masses_of(p + i, s, mass);
        __builtin_memcpy(weights + i, mass, sizeof mass);
    }
}

// Room for whole groups behind the last of n logits.
inline void pad(float* p, int64_t n) {
    for (int64_t i = n; i < n + kGroup; ++i) p[i] = -kInfinity;
}

// Drops all but `keep` of the logits equal to x; which of them does not matter.
inline int64_t drop_equal(float* p, int64_t n, float x, int64_t keep) {
    int64_t kept = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (p[i] == x && keep-- <= 0) continue;
        p[kept++] = p[i];
    }
    return kept;
}

constexpr double kFirstLevels[kLevels] = {-1.0, -2.0, -3.0, -4.5, -6.0, -9.0, -13.0};

// Levels at equal distances from high down to low.
inline void cut_evenly(Cuts& cuts, double low, double high) {
    for (int l = 0; l < kLevels; ++l)
        cuts.from[l] = static_cast<float>(high - (high - low) / (kLevels - 1) * l);
}

inline Cuts first_cuts(const Selection& s, float low) {
    Cuts cuts;
    cuts.low = low, cuts.high = kInfinity;
    for (int l = 0; l < kLevels; ++l)
        cuts.from[l] = static_cast<float>(s.largest + s.temperature * kFirstLevels[l]);
    return cuts;
}

// Of a sum of fp32 exponentials: y in fp32 (32 x 3 roundings), the exponential, 64 additions.
constexpr double kEstimateError = 2e-5;

// upto[l]: the mass of what reaches from[l], in units of the largest token's; the last: of all.
struct Estimate {
    double upto[kLevels + 1] = {};
};

inline void estimate_blocks(const Selection& s, const Cuts& cuts, int64_t first, int64_t end,
                            Estimate& out) {
    const F inverse = set1(static_cast<float>(1.0 / s.temperature)), top = set1(s.largest);
    const F deepest = set1(cuts.low_of(kLevels - 1));
    F from[kLevels];
    for (int l = 0; l < kLevels; ++l) from[l] = set1(cuts.low_of(l));
    for (int64_t b = first; b < end; ++b) {
        F sums[kLevels + 1];
        for (F& sum : sums) sum = zero();
        for_reaching(s.row, s.maxima, b, b + 1, cuts.low, [&](int64_t, F x, uint32_t bits) {
            const F w = exp((x - top) * inverse);
            sums[kLevels] = add_bits(sums[kLevels], w, bits);
            if (!ge_bits(x, deepest)) return true;
            for (int l = 0; l < kLevels; ++l) sums[l] = add_bits(sums[l], w, ge_bits(x, from[l]));
            return true;
        });
        for (int l = 0; l <= kLevels; ++l) {
            float lanes[W];
            store(lanes, sums[l]);
            for (const float lane : lanes) out.upto[l] += static_cast<double>(lane);
        }
    }
}

inline Estimate estimate(const Selection& s, const Cuts& cuts) {
    Estimate found[kMaxParts];
    for_parts(s.parts, blocks_of(s.row.vocab), [&](int64_t p, int64_t first, int64_t end) {
        estimate_blocks(s, cuts, first, end, found[p]);
    });
    for (int64_t p = 1; p < s.parts; ++p)
        for (int l = 0; l <= kLevels; ++l) found[0].upto[l] += found[p].upto[l];
    return found[0];
}

constexpr int64_t kFew = 1024;  // so many are weighed one by one

// Where the mass of the logits in s.few reaches `need`: what lies above a range is known.
struct Narrowed {
    int64_t n, above, need;
};

// Narrows many logits down to the range in which their mass, from the top, reaches top_p of it.
// Share by share: each round weighs what is left and keeps one of eight ranges.
inline Narrowed narrow(const Selection& s, int64_t n, Cuts cuts, double top_p) {
    int64_t need = -1, above = 0;
    for (;;) {
        int64_t found[kMaxParts][kLevels + 1], shares[kLevels + 1] = {};
        const int64_t units = blocks_of(n);
        const int64_t parts = smaller(s.parts, units);
        for_parts(parts, units, [&](int64_t p, int64_t begin, int64_t end) {
            const int64_t stop = smaller(end * kBlock, n);
            add_masses(s.few + begin * kBlock, stop - begin * kBlock, s, cuts, found[p]);
        });
        int64_t total = 0;
        for (int64_t p = 0; p < parts; ++p)
            for (int l = 0; l <= kLevels; ++l) shares[l] += found[p][l], total += found[p][l];
        if (need < 0) need = needed_mass(top_p, total);
        int at = 0;
        while (at < kLevels && above + shares[at] < need) above += shares[at++];
        const float from = cuts.low_of(at), to = cuts.high_of(at);
        cuts.low = from, cuts.high = to;
        int64_t inside = 0;
        for (int64_t i = 0; i < n; i += W) {
            const F x = load(s.few + i);
            const uint32_t bits = ge_bits(x, set1(from)) & ~ge_bits(x, set1(to));
            compress(s.few + inside, x, bits);
            inside += __builtin_popcount(bits);
        }
        pad(s.few, inside);
        const bool stuck = inside > n / 2;  // equal logits, or spread over all scales
        n = inside;
        if (n <= kFew || stuck) return {n, above, need};
        const double top = to < kInfinity ? to : s.largest;
        cut_evenly(cuts, from + (top - from) / (kLevels + 1), top - (top - from) / (kLevels + 1));
    }
}

// The end of the prefix that holds `need` of the mass of what `kept` leaves, which crosses at `at`.
inline Bound end_of(const Selection& s, const Bound& kept, const Crossing& at, int64_t need) {
    const int64_t mass = token_mass(scaled(at.x, s.largest, s.temperature));
    const int64_t ties = (need - at.above + mass - 1) / mass;
    if (ties < at.equal) return {at.x, -1, ties};  // last: where the tie-th of them lies
    return at.x == kept.x ? kept : Bound{at.x, INT64_MAX, at.equal};
}

inline Bound with_last(const Selection& s, Bound end) {
    if (end.last < 0) end.last = nth_equal(s.row, s.maxima, end.x, end.ties);
    return end;
}

// The shortest prefix of what `kept` leaves that holds top_p of its mass, without the mass of every
// token: the whole is estimated, and where the prefix ends is the same for all that it may be.
// Only the tokens down to there are weighed. False where it is not sure, or far; cuts then lie
// around the likely end.
inline bool first_mass_estimated(const Selection& s, const Bound& kept, double top_p, Cuts& cuts,
                                 Bound* end) {
    if (s.row.vocab < 8 * kFew || s.temperature < 1e-3 || s.temperature > 1e3) return false;
    const Estimate e = estimate(s, cuts);
    const double lost = static_cast<double>(s.row.vocab);  // by rounding down, a unit a token
    const auto units = [](double x) { return static_cast<int64_t>(x < 1.0 ? 1.0 : x); };
    const double whole = e.upto[kLevels] * kMassUnit;
    const int64_t least = needed_mass(top_p, units(whole * (1.0 - kEstimateError) - lost));
    const int64_t most = needed_mass(top_p, units(whole * (1.0 + kEstimateError) + 1.0));
    int at = 0;
    while (at < kLevels && e.upto[at] * kMassUnit * (1.0 - kEstimateError) - lost < most) ++at;
    const float low = cuts.low_of(at);
    const float high = at > 0 ? cuts.high_of(at) : s.largest;
    cut_evenly(cuts, low, high);
    if (at == kLevels) return false;
    // Each token of the last share weighs no more than its upper end.
    const double share = e.upto[at] - (at > 0 ? e.upto[at - 1] : 0.0);
    if (at > 0 && share > kFew * std::exp(kFirstLevels[at - 1])) return false;
    const int64_t n = collect(s.row, s.maxima, s.parts, low, s.few);
    if (n > kFew) return false;
    pad(s.few, n);
    weigh(s.few, n, s, s.weights);
    float* again = s.few + 2 * kFew;
    int64_t* weights = s.weights + 2 * kFew;
    std::memcpy(again, s.few, static_cast<size_t>(n) * sizeof(float));
    std::memcpy(weights, s.weights, static_cast<size_t>(n) * sizeof(int64_t));
    const Bound a = end_of(s, kept, cross(s.few, s.weights, n, least, s.buckets), least);
    const Bound b = end_of(s, kept, cross(again, weights, n, most, s.buckets), most);
    if (a.x != b.x || a.last != b.last || a.ties != b.ties) return false;
    *end = with_last(s, a);
    return true;
}

// The shortest prefix of what `kept` leaves that holds top_p of its mass.
inline Bound first_mass(const Selection& s, const Bound& kept, double top_p) {
    const float massless = lowest_reaching(kMinExponent, s.largest, s.temperature);
    const bool all_ties = massless > kept.x || kept.last == INT64_MAX;
    const float low = massless > kept.x ? massless : kept.x;
    Bound end;
    Cuts cuts = first_cuts(s, low);
    if (all_ties && first_mass_estimated(s, kept, top_p, cuts, &end)) return end;
    int64_t n = collect(s.row, s.maxima, s.parts, low, s.few);
    if (!all_ties) n = drop_equal(s.few, n, kept.x, kept.ties);
    pad(s.few, n);
    Narrowed left = {n, 0, 0};
    if (n > kFew) left = narrow(s, n, cuts, top_p);
    weigh(s.few, left.n, s, s.weights);
    if (n <= kFew) {
        int64_t total = 0;
        for (int64_t i = 0; i < n; ++i) total += s.weights[i];
        left.need = needed_mass(top_p, total);
    }
    const int64_t need = left.need - left.above;
    return with_last(s, end_of(s, kept, cross(s.few, s.weights, left.n, need, s.buckets), need));
}
