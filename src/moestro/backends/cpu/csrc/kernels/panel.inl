// Products of one panel with any number of rows: cuts them into tiles.

// Calls fn.run<R, C>(row, vector) for tiles that cover n rows and `width` vectors, rows spread
// evenly over as few tiles as there can be.
template <int kRows, class Fn>
inline void for_tiles(int64_t n, int64_t width, const Fn& fn) {
    for (int64_t left = blocks(n, kRows), row = 0; left > 0; --left) {
        const int64_t rows = blocks(n - row, left);
        fn.template with_rows<kRows>(rows, row, width);
        row += rows;
    }
}

template <class Tile>
struct TileOfRows {
    const Tile& tile;

    template <int R>
    void with_rows(int64_t rows, int64_t row, int64_t width) const {
        if constexpr (R > 1) {
            if (rows < R) return with_rows<R - 1>(rows, row, width);
        }
        constexpr int C = Tile::columns(R);
        int64_t vector = 0;
        for (; vector + C <= width; vector += C) tile.template run<R, C>(row, vector);
        if constexpr (C > 1)
            for (; vector < width; ++vector) tile.template run<R, 1>(row, vector);
    }
};

template <class Fmt>
struct FloatTiles {
    Block block;
    static constexpr int columns(int rows) { return float_columns(rows); }
    template <int R, int C>
    void run(int64_t row, int64_t vector) const {
        Block b = block;
        b.fetch = row + vector == 0;
        b.lines += vector * Fmt::kLineBytes;
        b.x += row;
        b.out += row * kOutStride + vector * kVectorRows;
        if (b.scales != nullptr) b.scales = static_cast<const float*>(b.scales) + vector * 16;
        float_tile<Fmt, R, C>(b);
    }
};

struct Int8Tiles {
    const PackedLayout& layout;
    Block block;
    static constexpr int columns(int rows) { return float_columns(rows); }
    template <int R, int C>
    void run(int64_t row, int64_t vector) const {
        Block b = block;
        b.fetch = row + vector == 0;
        b.lines += vector * Int8::kLineBytes;
        b.x += row;
        b.out += row * kOutStride + vector * kVectorRows;
        b.scales = static_cast<const float*>(b.scales) + vector * kVectorRows;
        int8_tile<R, C>(layout, b);
    }
};

template <bool zeros, class Scale>
struct NibbleTiles {
    const PackedLayout& layout;
    Block block;
    static constexpr int columns(int rows) { return nibble_columns(rows); }
    template <int R, int C>
    void run(int64_t row, int64_t vector) const {
        Block b = block;
        b.fetch = row + vector == 0;
        b.x += row;
        b.out += row * kOutStride + vector * kVectorRows;
        nibble_tile<zeros, Scale, R, C>(layout, b, vector);
    }
};

template <int kRows, class Tile>
inline void run_tiles(int64_t n, int64_t width, const Tile& tile) {
    for_tiles<kRows>(n, width, TileOfRows<Tile>{tile});
}

// out[n][kOutStride] = rows . panel^T, kVectorRows columns a vector.
using Multiply = void (*)(const PackedLayout& l, const uint8_t* panel, int64_t width,
                          const void* const* rows, int64_t n, float* out);

template <class Fmt>
constexpr bool kIsFp8 = Fmt::kLineK == 4;

inline void clear(float* out, int64_t n) {
    __builtin_memset(out, 0, static_cast<size_t>(n * kOutStride) * sizeof(float));
}

// Lines of fp8 as lines of bf16, two for one.
inline void decode_fp8_lines(const uint8_t* lines, int64_t width, int64_t count, uint8_t* wide) {
    for (int64_t j = 0; j < count; ++j)
        for (int64_t v = 0; v < width; ++v) {
            __builtin_prefetch(lines + (j * width + v) * 64 + kAhead, 0, 2);
            const Fp8Pairs pairs = decode_fp8(lines + (j * width + v) * 64);
            store_pairs(wide + (2 * j * width + v) * 64, pairs.first);
            store_pairs(wide + ((2 * j + 1) * width + v) * 64, pairs.second);
        }
}

// out[r] *= the scales at the panel's head.
inline void scale_rows(const uint8_t* panel, int64_t width, int64_t n, float* out) {
    const float* scales = reinterpret_cast<const float*>(panel);
    for (int64_t r = 0; r < n; ++r)
        for (int64_t v = 0; v < width; ++v) {
            float* at = out + r * kOutStride + v * kVectorRows;
            store_lanes(at, load_lanes(at) * load_lanes(scales + v * kVectorRows));
        }
}

constexpr int64_t kDecodeRows = 8;  // from more rows on, fp8 is decoded once, not once a tile

template <class Fmt>
void multiply_float(const PackedLayout& l, const uint8_t* panel, int64_t width,
                    const void* const* rows, int64_t n, float* out) {
    clear(out, n);
    const int64_t stride = width * Fmt::kLineBytes;
    for (int64_t i = 0; i < l.blocks(); ++i) {
        const uint8_t* head = panel + l.block_at(i, width);
        const int64_t first = i * l.block_lines;
        const Block block{head + l.block_head_bytes(width),
                          stride,
                          smaller(l.block_lines, l.lines - first),
                          rows,
                          first * Fmt::kLineK,
                          l.group_scales() ? head : nullptr,
                          out,
                          false};
        if constexpr (kIsFp8<Fmt>) {
            using Wide = typename Fmt::Wide;
            if (n > kDecodeRows) {
                alignas(64) uint8_t wide[2 * kBlockK * kPanelRows];
                decode_fp8_lines(block.lines, width, block.count, wide);
                Block decoded = block;
                decoded.lines = wide;
                decoded.count = 2 * block.count;
                run_tiles<kMaxTileRows>(n, width, FloatTiles<Wide>{decoded});
                continue;
            }
            run_tiles<kFp8TileRows>(n, width, FloatTiles<Fmt>{block});
        } else {
            run_tiles<kMaxTileRows>(n, width, FloatTiles<Fmt>{block});
        }
    }
    if (l.row_scales()) scale_rows(panel, width, n, out);
}

inline void multiply_int8(const PackedLayout& l, const uint8_t* panel, int64_t width,
                          const void* const* rows, int64_t n, float* out) {
    const Block block{
        panel + l.head_bytes(width), width * Int8::kLineBytes, l.lines, rows, 0, panel, out, false};
    run_tiles<kMaxTileRows>(n, width, Int8Tiles{l, block});
}

template <bool zeros, class Scale>
void multiply_nibbles(const PackedLayout& l, const uint8_t* panel, int64_t width,
                      const void* const* rows, int64_t n, float* out) {
    const Block block{panel, width * Nibbles::kLineBytes, 0, rows, 0, nullptr, out, false};
    run_tiles<kNibbleTileRows>(n, width, NibbleTiles<zeros, Scale>{l, block});
}

inline Multiply nibble_product(const PackedLayout& l) {
    if (l.has_zeros)
        return l.fp32_scales ? multiply_nibbles<true, float> : multiply_nibbles<true, bf16>;
    return l.fp32_scales ? multiply_nibbles<false, float> : multiply_nibbles<false, bf16>;
}
