// Elementary functions, lane by lane: a value's result depends on that value only.

constexpr float kExpLow = -87.33654f;  // ln of the smallest normal number

// Zero where e^x is below the normal numbers: their subnormal values are not worth the hundreds of
// cycles that processors take for each. Infinity above, NaN for NaN.
__attribute__((always_inline)) inline F exp(F given) {
    const F x = min(set1(89.0f), max(set1(kExpLow), given));
    const F n = round_even(x * set1(1.44269504088896341f));
    F r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    F p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, r * r, r) + set1(1.0f);
    return zero_below(given, kExpLow, scale2(p, n));
}

inline F sigmoid(F x) { return set1(1.0f) / (set1(1.0f) + exp(neg(x))); }

inline F silu(F x) { return x / (set1(1.0f) + exp(neg(x))); }

// Calls body(i, n) for every vector of [0, size): n = W but for the tail.
template <class Body>
inline void for_vectors(int64_t size, Body&& body) {
    int64_t i = 0;
    for (; i + W <= size; i += W) body(i, static_cast<int64_t>(W));
    if (i < size) body(i, size - i);
}

template <class T>
inline F load_some(const T* p, int64_t n) {
    return n == W ? load(p) : load_n(p, n);
}

template <class T>
inline void store_some(T* p, F x, int64_t n) {
    if (n == W)
        store(p, x);
    else
        store_n(p, x, n);
}

// Calls fn with a null pointer of the element type that `dtype` names.
template <class Fn>
inline void with_dtype(int32_t dtype, Fn&& fn) {
    if (dtype == kF32)
        fn(static_cast<float*>(nullptr));
    else if (dtype == kBF16)
        fn(static_cast<bf16*>(nullptr));
    else
        fn(static_cast<f16*>(nullptr));
}

template <class Ptr>
using pointee = std::remove_pointer_t<Ptr>;
