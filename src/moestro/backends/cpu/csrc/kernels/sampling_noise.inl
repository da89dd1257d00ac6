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

// The upper 32 bits of each of the W tokens' noise bits from token i on.
inline VI noise_words(uint64_t key, int64_t i) {
    VU lanes;
    for (int j = 0; j < H; ++j) lanes[j] = static_cast<uint64_t>(j) * kGolden;
    VU z[2];
    for (int half = 0; half < 2; ++half) {
        const uint64_t at = static_cast<uint64_t>(i) + 1 + static_cast<uint64_t>(half * H);
        VU x = lanes + setu(key + at * kGolden);
        x = (x ^ x >> 30) * kMultiplier1;
        x = (x ^ x >> 27) * kMultiplier2;
        z[half] = x ^ x >> 31;
    }
    const VI a = (VI)z[0], b = (VI)z[1];
#if defined(__AVX512F__)
    return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#else
    return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#endif
}

// floor(2^44 exp(y)) for y <= 0, 0 below -32: token_mass of ops/noise.py.
inline VL token_mass(VD y) {
    const VD lowest = setd(kMinExponent);
    const VD r = (y < lowest ? lowest : y) * 0.0078125;
    VD total = r * (1.0 / 362880.0) + 1.0 / 40320.0;
    constexpr double terms[] = {1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0,
                                1.0 / 6.0,    1.0 / 2.0,   1.0,         1.0};
    for (const double term : terms) total = total * r + term;
    for (int i = 0; i < 7; ++i) total = total * total;
    return whole_of(total * kMassUnit);
}

// needed_mass of ops/noise.py.
inline int64_t needed_mass(double top_p, int64_t total) {
    const double product = top_p * static_cast<double>(total);
    if (product >= 9.2e18) return total;
    int64_t needed = static_cast<int64_t>(product);
    needed += static_cast<double>(needed) < product;
    return needed < total ? needed : total;
}

// exp(x) for x <= 0, within an ulp or so; 0 below the normal numbers.
inline VD exp_double(VD given) {
    const VD lowest = setd(-708.0);
    const VD x = given < lowest ? lowest : given;
    const VD magic = setd(6755399441055744.0);  // 1.5 * 2^52
    const VD shifted = x * 1.4426950408889634 + magic;
    const VD n = shifted - magic;
    const VD r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
    VD p = r * (1.0 / 479001600.0) + 1.0 / 39916800.0;
    constexpr double terms[] = {
        1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0,
        1.0 / 24.0,      1.0 / 6.0,      1.0 / 2.0,     1.0,          1.0};
    for (const double term : terms) p = p * r + term;
    const VL exponent = ((VL)shifted - (VL)magic + 1023) << 52;
    return given < lowest ? VD{} : p * (VD)exponent;
}
