// Rows of the KV cache: a head's numbers into codes and back, as quant/kv.py spells it.

// Element types of quantised pages.
struct Int8Code {
    int8_t bits;
    static constexpr float kLargest = 127.0f;
};
struct Fp8Code {
    uint8_t bits;
    static constexpr float kLargest = 448.0f;
};

template <class T>
constexpr bool is_code = std::is_same_v<T, Int8Code> || std::is_same_v<T, Fp8Code>;

// Calls fn with a null pointer of the element type that KvPages::dtype names.
template <class Fn>
inline void with_page_dtype(int32_t dtype, Fn&& fn) {
    if (dtype == kKvInt8)
        fn(static_cast<Int8Code*>(nullptr));
    else if (dtype == kKvFp8)
        fn(static_cast<Fp8Code*>(nullptr));
    else
        with_dtype(dtype, fn);
}

inline void round_codes(const float* x, int64_t n, Int8Code* out) {
    for (int64_t i = 0; i < n; ++i) out[i].bits = static_cast<int8_t>(static_cast<int32_t>(x[i]));
}

// Values of magnitude 448 or less to E4M3, to the nearest, ties to even.
inline void round_codes(const float* x, int64_t n, Fp8Code* out) {
    for (int64_t i = 0; i < n; ++i) {
        uint32_t u;
        __builtin_memcpy(&u, x + i, 4);
        const uint32_t sign = u >> 24 & 0x80u, mag = u & 0x7fffffffu;
        const uint32_t rounded = mag + 0x7ffffu + (mag >> 20 & 1u);
        const uint32_t normal = (rounded >> 20) - (120u << 3);
        // Below 2^-6 steps are of 2^-9: adding 2^14 leaves them in the last bits, rounded.
        float small;
        __builtin_memcpy(&small, &mag, 4);
        small += 16384.0f;
        uint32_t steps;
        __builtin_memcpy(&steps, &small, 4);
        const uint32_t subnormal = steps - 0x46800000u;
        out[i].bits = static_cast<uint8_t>(sign | (mag < 0x3c800000u ? subnormal : normal));
    }
}

inline void decode_codes(const Int8Code* x, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(x[i].bits);
}
inline void decode_codes(const Fp8Code* x, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t c = x[i].bits, mag = c & 0x7fu;
        const uint32_t bits = (mag << 20) + (120u << 23);
        float normal;
        __builtin_memcpy(&normal, &bits, 4);
        const float value =
            mag < 8 ? static_cast<float>(static_cast<int32_t>(mag)) * 0x1p-9f : normal;
        out[i] = c & 0x80u ? -value : value;
    }
}

// n of a row's numbers, times its scale where they are codes.
template <class TP>
inline F read_row(const TP* p, int64_t n, float scale) {
    if constexpr (is_code<TP>) {
        float values[W] = {};
        decode_codes(p, n, values);
        return load(values) * set1(scale);
    } else {
        return load_some(p, n);
    }
}

// Where one row of keys or values lies, and its scale where the elements are codes.
template <class TP>
struct PageRow {
    TP* at;
    float* scale;
};

template <class T, class TP>
__attribute__((noinline)) void store_row(const T* x, int64_t dim, PageRow<TP> to) {
    if constexpr (!is_code<TP>) {
        for_vectors(dim,
                    [&](int64_t i, int64_t n) { store_some(to.at + i, load_some(x + i, n), n); });
    } else {
        constexpr float kLargest = TP::kLargest;
        F top = zero(), bad = zero();
        for_vectors(dim, [&](int64_t i, int64_t n) {
            const F v = load_some(x + i, n);
            top = max(max(v, neg(v)), top);  // of equals the second: never -0
            bad = fma(v, zero(), bad);       // not a number once one is not finite
        });
        const bool finite = hsum(bad) == 0.0f;
        const float amax = hmax(top);
        const bool usable = finite && 127.0f / amax < __builtin_inff();  // else amax is tiny or 0
        const float scale = amax / kLargest;
        *to.scale = usable ? scale : finite ? 0.0f : __builtin_nanf("");
        float scaled[W];
        for_vectors(dim, [&](int64_t i, int64_t n) {
            F y = zero();
            if (usable && std::is_same_v<TP, Int8Code>)
                y = round_even(load_some(x + i, n) * set1(kLargest / amax));
            else if (usable)
                y = load_some(x + i, n) / set1(scale);
            store(scaled, min(max(y, set1(-kLargest)), set1(kLargest)));
            round_codes(scaled, n, to.at + i);
        });
    }
}
