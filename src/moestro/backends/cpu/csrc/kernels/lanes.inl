// Sixteen fp32 lanes, one a row of weights, from whatever vector F the level has.

constexpr int kParts = 16 / W;

struct Lanes {
    F part[kParts];
};

template <class Fn>
inline Lanes lanes_of(Fn&& fn) {
    Lanes r;
    for (int i = 0; i < kParts; ++i) r.part[i] = fn(i);
    return r;
}
inline Lanes no_lanes() {
    return lanes_of([](int) { return zero(); });
}
inline Lanes all_lanes(float x) {
    return lanes_of([&](int) { return set1(x); });
}
inline Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
    return lanes_of([&](int i) { return fma(a.part[i], b.part[i], c.part[i]); });
}
inline Lanes operator+(const Lanes& a, const Lanes& b) {
    return lanes_of([&](int i) { return a.part[i] + b.part[i]; });
}
inline Lanes operator*(const Lanes& a, const Lanes& b) {
    return lanes_of([&](int i) { return a.part[i] * b.part[i]; });
}
template <class T>
inline Lanes load_lanes(const T* p) {
    return lanes_of([&](int i) { return load(p + i * W); });
}
inline void store_lanes(float* p, const Lanes& x) {
    for (int i = 0; i < kParts; ++i) store(p + i * W, x.part[i]);
}
// The first n of sixteen, rounded to T.
template <class T>
inline void store_first(T* p, const float* x, int64_t n) {
    for_vectors(n, [&](int64_t i, int64_t lanes) { store_some(p + i, load(x + i), lanes); });
}
