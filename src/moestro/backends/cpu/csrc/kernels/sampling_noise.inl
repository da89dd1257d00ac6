// The noise and the top-p masses of ops/noise.py, bit for bit: wrapping 64-bit integers and single
// double operations, never contracted.

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
constexpr uint64_t kMultiplier1 = 0xBF58476D1CE4E5B9u, kMultiplier2 = 0x94D049BB133111EBu;
constexpr double kMassUnit = 17592186044416.0;  // 2^44
constexpr double kMinExponent = -32.0;          // no mass below

inline uint64_t finalise(uint64_t z) {
    z = (z ^ z >> 30) * kMultiplier1;
    z = (z ^ z >> 27) * kMultiplier2;
    return z ^ z >> 31;
}

inline uint64_t mix(uint64_t z) { return finalise(z + kGolden); }

inline uint64_t noise_key(int64_t seed, int64_t sample_index, int64_t position) {
    const uint64_t a = mix(static_cast<uint64_t>(seed)) ^ static_cast<uint64_t>(sample_index);
    return mix(mix(a) ^ static_cast<uint64_t>(position));
}

// log_of_parts of ops/noise.py, for positive normal numbers.
inline double log_number(double x) {
    uint64_t bits;
    __builtin_memcpy(&bits, &x, 8);
    int64_t exponent = 0;
    if (bits >> 52 == 0) {         // subnormal: min_p may be one
        x *= 18014398509481984.0;  // 2^54
        __builtin_memcpy(&bits, &x, 8);
        exponent = -54;
    }
    exponent += static_cast<int64_t>(bits >> 52) - 1022;
    bits = (bits & 0x000fffffffffffffu) | 0x3fe0000000000000u;
    double mantissa;  // in [1/2, 1)
    __builtin_memcpy(&mantissa, &bits, 8);
    const double low = mantissa < 0.7071067811865476 ? 1.0 : 0.0;
    const double m = mantissa * (low + 1.0);
    const double s = (m - 1.0) / (m + 1.0);
    const double z = s * s;
    double total = z * (1.0 / 23.0) + 1.0 / 21.0;
    constexpr double terms[] = {1.0 / 19.0, 1.0 / 17.0, 1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0,
                                1.0 / 9.0,  1.0 / 7.0,  1.0 / 5.0,  1.0 / 3.0,  1.0};
    for (const double term : terms) total = total * z + term;
    return (static_cast<double>(exponent) - low) * 0.6931471805599453 + (s + s) * total;
}

inline double gumbel(uint64_t key, int64_t token_id) {
    const uint64_t bits = finalise(key + (static_cast<uint64_t>(token_id) + 1) * kGolden);
    double u = static_cast<double>(bits >> 11);
    u = (u < 0.5 ? 0.5 : u) * 1.1102230246251565e-16;  // 2^-53
    return -log_number(-log_number(u));
}

// The upper 31 bits of each of the W tokens' noise bits from token i on, in bits 1 to 31 of a word;
// bit 0 is of no meaning. The last step of the hash changes none of these bits and is left out.
inline VI noise_words(uint64_t key, int64_t i) {
    VU lanes;
    for (int j = 0; j < H; ++j) lanes[j] = static_cast<uint64_t>(j) * kGolden;
    VU x = lanes + setu(key + (static_cast<uint64_t>(i) + 1) * kGolden);
    VU y = x + setu(static_cast<uint64_t>(H) * kGolden);
    x = (x ^ x >> 30) * kMultiplier1;
    y = (y ^ y >> 30) * kMultiplier1;
    x = (x ^ x >> 27) * kMultiplier2;
    y = (y ^ y >> 27) * kMultiplier2;
    const VI a = (VI)x, b = (VI)y;
#if defined(__AVX512F__)
    return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#else
    return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#endif
}

// Vectors that go through a long chain of operations together, to hide its latency.
constexpr int kChains = 4;

// floor(2^44 exp(y)) for y <= 0, 0 below -32: token_mass of ops/noise.py.
template <int kCount>
inline void token_masses(const VD* y, VL* out) {
    const VD lowest = setd(kMinExponent);
    VD r[kCount], total[kCount];
    for (int c = 0; c < kCount; ++c) {
        r[c] = (y[c] < lowest ? lowest : y[c]) * 0.0078125;
        total[c] = r[c] * (1.0 / 362880.0) + 1.0 / 40320.0;
    }
    constexpr double terms[] = {1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0,
                                1.0 / 6.0,    1.0 / 2.0,   1.0,         1.0};
    for (const double term : terms)
        for (int c = 0; c < kCount; ++c) total[c] = total[c] * r[c] + term;
    for (int i = 0; i < 7; ++i)
        for (int c = 0; c < kCount; ++c) total[c] = total[c] * total[c];
    for (int c = 0; c < kCount; ++c) out[c] = whole_of(total[c] * kMassUnit);
}

inline int64_t token_mass(double y) {
    const VD all = setd(y);
    VL mass;
    token_masses<1>(&all, &mass);
    return mass[0];
}

// needed_mass of ops/noise.py.
inline int64_t needed_mass(double top_p, int64_t total) {
    const double product = top_p * static_cast<double>(total);
    if (product >= 9.2e18) return total;
    int64_t needed = static_cast<int64_t>(product);
    needed += static_cast<double>(needed) < product;
    return needed < total ? needed : total;
}

// exp(x) for x <= 0, within an ulp or so, of kChains vectors; 0 below the normal numbers.
inline void exp_doubles(const VD* given, VD* out) {
    const VD lowest = setd(-708.0), magic = setd(6755399441055744.0);  // 1.5 * 2^52
    VD r[kChains], p[kChains], shifted[kChains];
    for (int c = 0; c < kChains; ++c) {
        const VD x = given[c] < lowest ? lowest : given[c];
        shifted[c] = fused(x, setd(1.4426950408889634), magic);
        const VD n = shifted[c] - magic;
        r[c] = fused(n, setd(-0.693147180369123816490), x);
        r[c] = fused(n, setd(-1.90821492927058770002e-10), r[c]);
        p[c] = fused(r[c], setd(1.0 / 479001600.0), setd(1.0 / 39916800.0));
    }
    constexpr double terms[] = {
        1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0,
        1.0 / 24.0,      1.0 / 6.0,      1.0 / 2.0,     1.0,          1.0};
    for (const double term : terms)
        for (int c = 0; c < kChains; ++c) p[c] = fused(p[c], r[c], setd(term));
    for (int c = 0; c < kChains; ++c) {
        const VL exponent = ((VL)shifted[c] - (VL)magic + 1023) << 52;
        out[c] = given[c] < lowest ? VD{} : p[c] * (VD)exponent;
    }
}
