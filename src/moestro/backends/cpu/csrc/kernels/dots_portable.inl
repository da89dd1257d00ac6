// Lines of packed weights times broadcast activations: GNU vectors and plain loops.

constexpr bool kDotsBf16 = false;  // bf16 activations are widened to fp32

struct Sums {
    V8i half[2];
};
inline Sums all_sums(int32_t x) {
    const V8i all = {x, x, x, x, x, x, x, x};
    return {{all, all}};
}
inline Lanes to_lanes(const Sums& a) {
    return lanes_of([&](int i) { return F{__builtin_convertvector(a.half[i], V8f)}; });
}
inline Sums times_zeros(const uint8_t* zeros, int32_t x) {
    Sums r;
    for (int i = 0; i < 16; ++i) r.half[i / 8][i % 8] = zeros[i] * x;
    return r;
}

// a * b + c for whole a: in float64, where the product is exact, then rounded. fma without the
// instruction, but for sums that fall on a tie of float64.
inline Lanes fused(const Lanes& a, const Lanes& b, const Lanes& c) {
    typedef double V8d __attribute__((vector_size(64)));
    const auto wide = [](const F& x) { return __builtin_convertvector(x.v, V8d); };
    return lanes_of([&](int i) {
        const V8d sum = wide(a.part[i]) * wide(b.part[i]) + wide(c.part[i]);
        return F{__builtin_convertvector(sum, V8f)};
    });
}

struct Codes {  // unsigned weights, 16 rows x 4 k
    V8u half[2];
};
struct Signed {  // 4 k of one row of activations
    int32_t x[4];
};
inline Codes load_codes(const uint8_t* line) {
    Codes r;
    __builtin_memcpy(&r, line, 64);
    return r;
}
inline Codes low_codes(const Codes& line) {
    return {{line.half[0] & 0x0f0f0f0fu, line.half[1] & 0x0f0f0f0fu}};
}
inline Codes high_codes(const Codes& line) {
    return {{(line.half[0] >> 4) & 0x0f0f0f0fu, (line.half[1] >> 4) & 0x0f0f0f0fu}};
}
inline Signed spread_signed(const int8_t* x) { return {{x[0], x[1], x[2], x[3]}}; }
// The first byte in memory is the lowest one: packed buffers are of little-endian machines.
inline Sums dot_codes(const Sums& a, const Codes& w, const Signed& x) {
    Sums r = a;
    for (int i = 0; i < 2; ++i)
        for (int k = 0; k < 4; ++k) r.half[i] += (V8i)((w.half[i] >> (8 * k)) & 255u) * x.x[k];
    return r;
}
inline Sums dot_nibbles(const Sums& a, const Codes& w, const Signed& x) {
    return dot_codes(a, w, x);
}

struct Pairs {  // bf16 weights, 16 rows x 2 k
    V8u half[2];
};
inline Pairs load_pairs(const void* line) {
    Pairs r;
    __builtin_memcpy(&r, line, 64);
    return r;
}
inline Lanes even_of(const Pairs& w) {
    return lanes_of([&](int i) { return F{(V8f)(w.half[i] << 16)}; });
}
inline Lanes odd_of(const Pairs& w) {
    return lanes_of([&](int i) { return F{(V8f)(w.half[i] & 0xffff0000u)}; });
}

struct Fp8Table {
    uint16_t bits[256];
    constexpr Fp8Table() : bits() {
        for (int code = 0; code < 256; ++code)
            bits[code] = static_cast<uint16_t>(fp8_as_bf16(code & 0x7f) | (code & 0x80) << 8);
    }
};
constexpr Fp8Table kFp8Table;

struct Fp8Pairs {
    Pairs first, second;  // k = 0, 1 and 2, 3
};
inline Fp8Pairs decode_fp8(const uint8_t* line) {
    Fp8Pairs r;
    for (int row = 0; row < 16; ++row) {
        const uint8_t* at = line + row / 4 * 16 + row % 4 * 2;
        const auto pair = [&](int k) {
            return kFp8Table.bits[at[k]] | uint32_t{kFp8Table.bits[at[k + 1]]} << 16;
        };
        r.first.half[row / 8][row % 8] = pair(0);
        r.second.half[row / 8][row % 8] = pair(8);
    }
    return r;
}
inline void store_pairs(void* line, const Pairs& w) { __builtin_memcpy(line, &w, 64); }

// W whole numbers in [-127, 127].
inline void store_codes(int8_t* p, F x) {
    for (int i = 0; i < W; ++i) p[i] = static_cast<int8_t>(x.v[i]);
}
