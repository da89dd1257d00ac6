// The micro-kernels: a panel of packed weights times rows of prepared activations.
//
// An output is one lane of one accumulator. Along K a block of lines (512 k, or a group) is summed
// from low to high k, and blocks are added in order: nothing depends on the number of rows.

// The cache that the next lines are asked into, as __builtin_prefetch counts: 2 or 3.
struct SecondLevel {
    static constexpr int fetch_level(int) { return 2; }
};

struct FloatRows : SecondLevel {  // activations in fp32
    using X = float;
    using Sum = Lanes;
    using Spread = Lanes;
    static Spread spread(const float* x) { return all_lanes(*x); }
    static Sum none() { return no_lanes(); }
};

struct Float32 : FloatRows {
    static constexpr int kLineK = 1, kLineBytes = 64, kSteps = 1, kStepK = 1;
    using Line = Lanes;
    static Line line(const uint8_t* p) { return load_lanes(reinterpret_cast<const float*>(p)); }
    static const Lanes& step(const Line& l, int) { return l; }
    static Sum mac(const Sum& a, const Lanes& w, const Spread& x) { return fma(w, x, a); }
};

struct Float16 : Float32 {
    static constexpr int kLineBytes = 32;
    static Line line(const uint8_t* p) { return load_lanes(reinterpret_cast<const f16*>(p)); }
};

struct BFloat16 : FloatRows {
    static constexpr int kLineK = 2, kLineBytes = 64, kSteps = 2, kStepK = 1;
    using Line = Pairs;
    static Line line(const uint8_t* p) { return load_pairs(p); }
    static Lanes step(const Line& l, int i) { return i == 0 ? even_of(l) : odd_of(l); }
    static Sum mac(const Sum& a, const Lanes& w, const Spread& x) { return fma(w, x, a); }
};

struct Fp8 : FloatRows {
    static constexpr int kLineK = 4, kLineBytes = 64, kSteps = 4, kStepK = 1;
    using Line = Fp8Pairs;
    using Wide = BFloat16;  // the same numbers, decoded
    static Line line(const uint8_t* p) { return decode_fp8(p); }
    static Lanes step(const Line& l, int i) {
        const Pairs& pairs = i < 2 ? l.first : l.second;
        return i % 2 == 0 ? even_of(pairs) : odd_of(pairs);
    }
    static Sum mac(const Sum& a, const Lanes& w, const Spread& x) { return fma(w, x, a); }
};

#if defined(MOESTRO_LEVEL_AVX512) || defined(MOESTRO_LEVEL_AMX)
struct PairRows : SecondLevel {  // activations in bf16
    using X = bf16;
    using Sum = Lanes;
    using Spread = Pairs;
    static Spread spread(const bf16* x) { return spread_pair(x); }
    static Sum none() { return no_lanes(); }
    static Sum mac(const Sum& a, Pairs w, Spread x) { return dot_pairs(a, w, x); }
};

struct BFloat16Dots : PairRows {
    static constexpr int kLineK = 2, kLineBytes = 64, kSteps = 1, kStepK = 2;
    using Line = Pairs;
    static Line line(const uint8_t* p) { return load_pairs(p); }
    static Pairs step(Line l, int) { return l; }
};

struct Fp8Dots : PairRows {
    static constexpr int kLineK = 4, kLineBytes = 64, kSteps = 2, kStepK = 2;
    using Line = Fp8Pairs;
    using Wide = BFloat16Dots;
    static Line line(const uint8_t* p) { return decode_fp8(p); }
    static Pairs step(const Line& l, int i) { return i == 0 ? l.first : l.second; }
};
constexpr int kMaxTileRows = 6, kFp8TileRows = 4, kNibbleTileRows = 5;
constexpr int float_columns(int) { return 4; }
constexpr int nibble_columns(int) { return 4; }
constexpr int kNibbleSums = 8;  // sums of groups that fit the registers beside those of products
#elif defined(MOESTRO_LEVEL_AVX2)
constexpr int kMaxTileRows = 3, kFp8TileRows = 2, kNibbleTileRows = 2;
constexpr int float_columns(int rows) { return rows == 1 ? 4 : 2; }
constexpr int nibble_columns(int rows) { return rows == 1 ? 2 : 1; }
constexpr int kNibbleSums = 2;
#else
constexpr int kMaxTileRows = 2, kFp8TileRows = 2, kNibbleTileRows = 2;
constexpr int float_columns(int) { return 1; }
constexpr int nibble_columns(int) { return 1; }
constexpr int kNibbleSums = 2;
#endif

struct SignedRows : SecondLevel {  // activations in int8
    using X = int8_t;
    using Sum = Sums;
    using Spread = Signed;
    static Spread spread(const int8_t* x) { return spread_signed(x); }
};

struct Int8 : SignedRows {
    static constexpr int kLineK = 4, kLineBytes = 64, kSteps = 1, kStepK = 4;
    using Line = Codes;
    static Line line(const uint8_t* p) { return load_codes(p); }
    static const Codes& step(const Line& l, int) { return l; }
    static Sum mac(const Sum& a, const Codes& w, const Spread& x) { return dot_codes(a, w, x); }
};

struct Nibbles : SignedRows {
    static constexpr int fetch_level(int rows) { return rows > 1 ? 3 : 2; }
    static constexpr int kLineK = 8, kLineBytes = 64, kSteps = 2, kStepK = 4;
    using Line = Codes;
    static Line line(const uint8_t* p) { return load_codes(p); }
    static Codes step(const Line& l, int i) { return i == 0 ? low_codes(l) : high_codes(l); }
    static Sum mac(const Sum& a, const Codes& w, const Spread& x) { return dot_nibbles(a, w, x); }
};

// acc[r][v] += lines of vector v times x[r], from x[r][k] on. fetch: ask for the panel's next
// lines, of all its vectors.
template <class Fmt, int R, int C>
__attribute__((always_inline)) inline void add_lines(typename Fmt::Sum (&acc)[R][C],
                                                     const uint8_t* at, int64_t stride,
                                                     int64_t count, const typename Fmt::X* const* x,
                                                     int64_t k, bool fetch) {
    const typename Fmt::X* rows[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) rows[r] = x[r] + k;
    for (int64_t i = 0; i < count; ++i, at += stride) {
        if (fetch)
#pragma GCC unroll 4
            for (int v = 0; v < kPanelVectors; ++v)
                __builtin_prefetch(at + kAhead + v * Fmt::kLineBytes, 0, Fmt::fetch_level(R));
#pragma GCC unroll 8
        for (int v = 0; v < C; ++v) {
            const typename Fmt::Line line = Fmt::line(at + v * Fmt::kLineBytes);
#pragma GCC unroll 4
            for (int s = 0; s < Fmt::kSteps; ++s) {
                const auto w = Fmt::step(line, s);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
                    acc[r][v] = Fmt::mac(acc[r][v], w,
                                         Fmt::spread(rows[r] + i * Fmt::kLineK + s * Fmt::kStepK));
            }
        }
    }
}

constexpr int64_t kOutStride = kPanelRows;  // floats between rows of a product

// What a tile works on: a block of lines at vector 0 of the tile, and rows of x and of the product.
struct Block {
    const uint8_t* lines;
    int64_t stride, count;
    const void* const* x;
    int64_t k;
    const void* scales;  // of the tile's vectors, or null
    float* out;
    bool fetch;  // the first tile to read these lines
};

// out[r][v] += acc, or acc times the group's scales.
template <class Fmt, int R, int C>
__attribute__((noinline)) void float_tile(const Block& b) {
    using X = typename Fmt::X;
    typename Fmt::Sum acc[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < C; ++v) acc[r][v] = Fmt::none();
    add_lines<Fmt, R, C>(acc, b.lines, b.stride, b.count, reinterpret_cast<const X* const*>(b.x),
                         b.k, b.fetch);
    const float* scales = static_cast<const float*>(b.scales);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < C; ++v) {
            float* out = b.out + r * kOutStride + v * kVectorRows;
            const Lanes before = load_lanes(out);
            store_lanes(out, scales == nullptr
                                 ? before + acc[r][v]
                                 : fma(acc[r][v], load_lanes(scales + v * kVectorRows), before));
        }
}

// Where a prepared int8 row keeps what comes after its codes.
struct SignedRow {
    const int8_t* codes;
    const int32_t* starts;  // a group's first sum: minus the sum of its x, times what code 0 means
    float scale;

    SignedRow(const void* row, int64_t in_features, int64_t groups)
        : codes(static_cast<const int8_t*>(row)),
          starts(reinterpret_cast<const int32_t*>(codes + lines(in_features))),
          scale(*reinterpret_cast<const float*>(starts + groups)) {}
};

template <int R, int C>
__attribute__((noinline)) void int8_tile(const PackedLayout& l, const Block& b) {
    Sums acc[R][C];
    const int8_t* x[R];
    float scales[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const SignedRow row(b.x[r], l.in_features, 1);
        x[r] = row.codes;
        scales[r] = row.scale;
#pragma GCC unroll 4
        for (int v = 0; v < C; ++v) acc[r][v] = all_sums(row.starts[0]);
    }
    add_lines<Int8, R, C>(acc, b.lines, b.stride, b.count, x, 0, b.fetch);
    const float* weight_scales = static_cast<const float*>(b.scales);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < C; ++v)
            store_lanes(b.out + r * kOutStride + v * kVectorRows,
                        to_lanes(acc[r][v]) * load_lanes(weight_scales + v * kVectorRows) *
                            all_lanes(scales[r]));
}

// All groups of C vectors from `vector` on. b.lines is the panel, b.stride as for other tiles. The
// sums over groups are kept in registers where these suffice, else in b.out.
template <bool zeros, class Scale, int R, int C>
__attribute__((noinline)) void nibble_tile(const PackedLayout& l, const Block& b, int64_t vector) {
    constexpr bool kKept = R * C <= kNibbleSums;
    const int64_t groups = l.blocks(), width = b.stride / Nibbles::kLineBytes;
    const int64_t head = l.block_head_bytes(width), zeros_at = l.zeros_at(width);
    const int64_t group_bytes = head + l.block_lines * b.stride;
    const int8_t* x[R];
    const int32_t* starts[R];
    Lanes y[kKept ? R : 1][kKept ? C : 1];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const SignedRow row(b.x[r], l.in_features, groups);
        x[r] = row.codes;
        starts[r] = row.starts;
#pragma GCC unroll 4
        for (int v = 0; v < C; ++v) {
            if constexpr (kKept)
                y[r][v] = no_lanes();
            else
                store_lanes(b.out + r * kOutStride + v * kVectorRows, no_lanes());
        }
    }
    const uint8_t* group = b.lines;
    for (int64_t g = 0; g < groups; ++g, group += group_bytes) {
        Sums acc[R][C];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < C; ++v)
                acc[r][v] =
                    zeros ? times_zeros(group + zeros_at + (vector + v) * kVectorRows, starts[r][g])
                          : all_sums(starts[r][g]);
        add_lines<Nibbles, R, C>(acc, group + head + vector * Nibbles::kLineBytes, b.stride,
                                 l.block_lines, x, g * l.group_size, b.fetch);
        const Scale* scales = reinterpret_cast<const Scale*>(group) + vector * kVectorRows;
#pragma GCC unroll 4
        for (int v = 0; v < C; ++v) {
            const Lanes scale = load_lanes(scales + v * kVectorRows);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                if constexpr (kKept) {
                    y[r][v] = fused(to_lanes(acc[r][v]), scale, y[r][v]);
                } else {
                    float* out = b.out + r * kOutStride + v * kVectorRows;
                    store_lanes(out, fused(to_lanes(acc[r][v]), scale, load_lanes(out)));
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const Lanes scale = all_lanes(SignedRow(b.x[r], l.in_features, groups).scale);
#pragma GCC unroll 4
        for (int v = 0; v < C; ++v) {
            float* out = b.out + r * kOutStride + v * kVectorRows;
            if constexpr (kKept)
                store_lanes(out, y[r][v] * scale);
            else
                store_lanes(out, load_lanes(out) * scale);
        }
    }
}
