// Vectors in plain GNU C++: eight fp32 lanes that the compiler maps to what the target has.
// Included inside a level's namespace.
#pragma once

constexpr int W = 8;
constexpr int MR = 2;  // rows of x in a register tile

typedef float V8f __attribute__((vector_size(32)));
typedef int32_t V8i __attribute__((vector_size(32)));
typedef uint32_t V8u __attribute__((vector_size(32)));
typedef uint16_t V8h __attribute__((vector_size(16)));

struct F {
    V8f v;
};

inline F set1(float x) { return {V8f{x, x, x, x, x, x, x, x}}; }
inline F zero() { return set1(0.0f); }
inline F operator+(F a, F b) { return {a.v + b.v}; }
inline F operator-(F a, F b) { return {a.v - b.v}; }
inline F operator*(F a, F b) { return {a.v * b.v}; }
inline F operator/(F a, F b) { return {a.v / b.v}; }
inline F fma(F a, F b, F c) { return {a.v * b.v + c.v}; }
// min and max return b where a or b is not a number.
inline F max(F a, F b) { return {a.v > b.v ? a.v : b.v}; }
inline F min(F a, F b) { return {a.v < b.v ? a.v : b.v}; }
inline F neg(F a) { return {-a.v}; }
inline F round_even(F a) {
    const V8f magic = set1(12582912.0f).v;
    return {(a.v + magic) - magic};
}
// p * 2^n for whole n in [-252, 254]; two exact steps, rounded at most once.
inline F scale2(F p, F n) {
    const V8i whole = __builtin_convertvector(n.v, V8i);
    const V8i half = whole >> 1;
    const V8f a = (V8f)((half + 127) << 23), b = (V8f)((whole - half + 127) << 23);
    return {p.v * a * b};
}

// Zero where x is below `low`, y elsewhere.
inline F zero_below(F x, float low, F y) { return {x.v < set1(low).v ? zero().v : y.v}; }

inline float f32_of(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}
inline uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}

inline F load(const float* p) {
    F r;
    __builtin_memcpy(&r.v, p, 32);
    return r;
}
inline F load(const bf16* p) {
    V8h h;
    __builtin_memcpy(&h, p, 16);
    return {(V8f)(__builtin_convertvector(h, V8u) << 16)};
}
// Half to single: rebias in the exponent field, then correct subnormals, infinities and NaN.
inline F load(const f16* p) {
    V8h h;
    __builtin_memcpy(&h, p, 16);
    const V8u wide = __builtin_convertvector(h, V8u);
    const V8u sign = (wide & 0x8000u) << 16, rest = (wide & 0x7fffu) << 13;
    const V8f scaled = (V8f)rest * f32_of(0x77800000u);  // 2^112
    const V8u special = rest | 0x7f800000u;
    return {(V8f)(sign | (rest >= 0x0f800000u ? special : (V8u)scaled))};
}
inline void store(float* p, F x) { __builtin_memcpy(p, &x.v, 32); }
inline void store(bf16* p, F x) {
    const V8u u = (V8u)x.v;
    const V8u rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const V8u quiet = (u >> 16) | 0x40u;
    const V8u kept = (u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded;
    const V8h h = __builtin_convertvector(kept, V8h);
    __builtin_memcpy(p, &h, 16);
}
inline uint16_t half_bits(float x) {
    const uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000u, mag = u & 0x7fffffffu;
    if (mag > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (mag >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (mag < 0x38800000u) {  // subnormal: let the addition round
        const float shifted = f32_of(mag) + 0.5f;
        return static_cast<uint16_t>(sign | (bits_of(shifted) - 0x3f000000u));
    }
    return static_cast<uint16_t>(sign | ((mag - 0x38000000u + 0xfffu + ((mag >> 13) & 1u)) >> 13));
}
inline void store(f16* p, F x) {
    for (int i = 0; i < W; ++i) p[i].bits = half_bits(x.v[i]);
}

template <class T>
inline F load_n(const T* p, int64_t n) {
    T full[W] = {};
    __builtin_memcpy(full, p, static_cast<size_t>(n) * sizeof(T));
    return load(full);
}
template <class T>
inline void store_n(T* p, F x, int64_t n) {
    T full[W];
    store(full, x);
    __builtin_memcpy(p, full, static_cast<size_t>(n) * sizeof(T));
}
// Keeps the first n lanes and puts `other` in the rest.
inline F keep_n(F x, int64_t n, float other) {
    for (int64_t i = n; i < W; ++i) x.v[i] = other;
    return x;
}

// Sum of all lanes in one fixed tree.
inline float hsum(F x) {
    const V8f v = x.v;
    return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]));
}
inline float hmax(F x) {
    float m = x.v[0];
    for (int i = 1; i < W; ++i) m = x.v[i] > m || x.v[i] != x.v[i] ? x.v[i] : m;
    return m;
}
inline void hsum4(const F* a, float* out) {
    for (int i = 0; i < 4; ++i) out[i] = hsum(a[i]);
}

// out[i] lane j = in[j] lane i
inline void transpose(const F* in, F* out) {
    for (int i = 0; i < W; ++i)
        for (int j = 0; j < W; ++j) out[i].v[j] = in[j].v[i];
}

// 2 W bf16: the even ones and the odd ones, no shuffles.
struct EvenOdd {
    F even, odd;
};
inline EvenOdd load_even_odd(const bf16* p) {
    V8u u;
    __builtin_memcpy(&u, p, 32);
    return {{(V8f)(u << 16)}, {(V8f)(u & 0xffff0000u)}};
}
