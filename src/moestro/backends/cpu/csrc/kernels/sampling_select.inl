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
    float* few;        // [V + W]
    int64_t* weights;  // [V + W]
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

// y of H logits from p on.
inline VD scaled_doubles(const float* p, const Selection& s) {
    const VD y = load_doubles(p) - setd(s.largest);
    return s.temperature == 1.0 ? y : y / setd(s.temperature);
}

constexpr int kLevels = 4;

// The mass of n logits at p, in `levels` shares: [0] those >= from[0], [1] those below that and
// >= from[1], and so on, [kLevels] the rest. p is padded to a multiple of H with -inf.
inline void add_masses(const float* p, int64_t n, const Selection& s, const double* from,
                       int64_t* levels) {
    VL sums[kLevels + 1] = {};
    for (int64_t i = 0; i < n; i += H) {
        const VD y = scaled_doubles(p + i, s);
        const VL mass = token_mass(y);
        for (int l = 0; l < kLevels; ++l) sums[l] += y >= setd(from[l]) ? mass : VL{};
        sums[kLevels] += mass;
    }
    int64_t before = 0;
    for (int l = 0; l <= kLevels; ++l) {
        const int64_t upto = total_of(sums[l]);
        levels[l] = upto - before;
        before = upto;
    }
}

inline void weigh(const float* p, int64_t n, const Selection& s, int64_t* weights) {
    for (int64_t i = 0; i < n; i += H) {
        const VL mass = token_mass(scaled_doubles(p + i, s));
        __builtin_memcpy(weights + i, &mass, sizeof mass);
    }
}

inline void pad(float* p, int64_t n) {
    for (int64_t i = n; i < n + W; ++i) p[i] = -kInfinity;
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

// The shortest prefix of what `kept` leaves that holds top_p of its mass.
inline Bound first_mass(const Selection& s, const Bound& kept, double top_p) {
    const float massless = lowest_reaching(kMinExponent, s.largest, s.temperature);
    const bool all_ties = massless > kept.x || kept.last == INT64_MAX;
    const float bound = massless > kept.x ? massless : kept.x;
    int64_t n = collect(s.row, s.maxima, s.parts, bound, s.few);
    if (!all_ties) n = drop_equal(s.few, n, kept.x, kept.ties);
    pad(s.few, n);
    int64_t need = 0, above = 0;
    if (n > 2048) {
        // Coarse first: the prefix ends in one of a few ranges of y, and only that is looked into.
        constexpr double from[kLevels] = {-2.0, -4.0, -6.0, -9.0};
        int64_t shares[kMaxParts][kLevels + 1], levels[kLevels + 1] = {}, total = 0;
        const int64_t units = (n + kBlock - 1) / kBlock;
        const int64_t parts = s.parts < units ? s.parts : units;
        for_parts(parts, units, [&](int64_t p, int64_t first, int64_t end) {
            const int64_t stop = end * kBlock < n ? end * kBlock : n;
            add_masses(s.few + first * kBlock, stop - first * kBlock, s, from, shares[p]);
        });
        for (int64_t p = 0; p < parts; ++p)
            for (int l = 0; l <= kLevels; ++l) levels[l] += shares[p][l], total += shares[p][l];
        need = needed_mass(top_p, total);
        int level = 0;
        while (level < kLevels && above + levels[level] < need) above += levels[level++];
        const float low =
            level < kLevels ? lowest_reaching(from[level], s.largest, s.temperature) : bound;
        const float high =
            level > 0 ? lowest_reaching(from[level - 1], s.largest, s.temperature) : kInfinity;
        int64_t inside = 0;
        for (int64_t i = 0; i < n; i += W) {
            const F x = load(s.few + i);
            const uint32_t bits = ge_bits(x, set1(low)) & ~ge_bits(x, set1(high));
            compress(s.few + inside, x, bits);
            inside += __builtin_popcount(bits);
        }
        n = inside;
        pad(s.few, n);
        weigh(s.few, n, s, s.weights);
    } else {
        weigh(s.few, n, s, s.weights);
        int64_t total = 0;
        for (int64_t i = 0; i < n; ++i) total += s.weights[i];
        need = needed_mass(top_p, total);
    }
    const Crossing at = cross(s.few, s.weights, n, need - above, s.buckets);
    VL mass = token_mass(setd(scaled(at.x, s.largest, s.temperature)));
    const int64_t rest = need - above - at.above;
    const int64_t ties = (rest + mass[0] - 1) / mass[0];
    if (ties >= at.equal && at.x == kept.x) return kept;
    if (ties >= at.equal) return {at.x, INT64_MAX, at.equal};
    return {at.x, nth_equal(s.row, s.maxima, at.x, ties), ties};
}
