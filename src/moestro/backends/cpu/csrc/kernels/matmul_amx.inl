// Matrix products on the tile unit (AMX): bf16, fp8, int8 and 4-bit weights.
//
// Sixteen lines of a packed vector are the second operand of a tile product as it must lie: a line
// is 16 outputs by 4 bytes of k. So weights are loaded from where they are. Rows of x are copied
// first, a stretch of K at a time: a tile's rows must lie evenly apart, which an expert's do not,
// and not a power of two apart, or they would fall into one set of the first-level cache.
//
// bf16. tdpbf16ps sums even and odd k apart, each from zero over a tile's 32 k, then adds their sum
// to the tile; vdpbf16ps adds k by k. A row's bits must not depend on how many rows there are, so
// at this level bf16 activations always meet bf16 and fp8 weights on tiles, a single row too: that
// one waits for the weights to come from memory, not for the tile unit. Zeros fill K up to whole
// steps, and shapes take rows only: a row sees the same instructions in any company.
//
// int8 is exact: as few rows as one register tile takes stay on vectors, more go on tiles.
//
// Tile shapes belong to a thread. A product sets its own when it begins, since whatever ran before
// on the thread (attention, another product) had others, and releases them at its end, since a
// thread with tiles in use costs 8 KB more at each switch.

constexpr int64_t kStepLines = 16;    // lines a tile
constexpr int64_t kStepBytes = 64;    // of a row of x that a tile takes
constexpr int64_t kCopyBytes = 1024;  // of a row of x copied at once: a block of bf16
constexpr int64_t kCopyStride = kCopyBytes + 64;
constexpr int64_t kBlockRows = 2 * kTileRows;
constexpr int64_t kTilesAhead = 8192;           // as kAhead: two steps of a panel
constexpr int64_t kSumStride = kOutStride * 4;  // bytes

// Rows of x that share tiles: m0, and m1 more in a second tile or none.
struct RowSplit {
    int64_t m0, m1;
    explicit RowSplit(int64_t rows)
        : m0(rows > kTileRows ? blocks(rows, 2) : rows), m1(rows - m0) {}
};

// The shapes in force in this thread.
class TileShapes {
  public:
    TileShapes() = default;
    TileShapes(const TileShapes&) = delete;
    TileShapes& operator=(const TileShapes&) = delete;
    ~TileShapes() { _tile_release(); }

    // One tile of rows: sums of four vectors 0-3, rows of x 4, weights 5-7. Two: sums of two
    // vectors 0-1 and 2-3, rows of x 4 and 5, weights 6-7.
    void take(const RowSplit& rows) {
        const int64_t m0 = rows.m0, m1 = rows.m1;
        const int64_t one[8] = {m0, m0, m0, m0, m0, 16, 16, 16};
        const int64_t two[8] = {m0, m0, m1, m1, m0, m1, 16, 16};
        set(m0, m1, m1 == 0 ? one : two, kStepBytes, kStepBytes);
    }
    // Sums 0-1; 64 k: rows of x 4, weights 5; what a group has beyond that: 6 and 7.
    void take_group(int64_t m, int64_t rest) {
        const int64_t shapes[8] = {m, m, 0, 0, m, 16, rest > 0 ? m : 0, rest / 4};
        set(m, rest, shapes, rest, kStepBytes);
    }

  private:
    int64_t first_ = -1, second_ = -1;

    // bytes6 and bytes7: widths of tiles 6 and 7.
    void set(int64_t first, int64_t second, const int64_t* rows, int64_t bytes6, int64_t bytes7) {
        if (first == first_ && second == second_) return;
        first_ = first;
        second_ = second;
        TileConfig config;
        for (int i = 0; i < 8; ++i) {
            const int64_t bytes = i == 6 ? bytes6 : i == 7 ? bytes7 : kStepBytes;
            config.rows[i] = static_cast<uint8_t>(rows[i]);
            config.row_bytes[i] = static_cast<uint16_t>(rows[i] > 0 ? bytes : 0);
        }
        make_visible(&config);
        _tile_loadconfig(&config);
    }
};

// Bytes [at, at + bytes) of n rows, with zeros up to whole steps.
inline void copy_rows(const void* const* rows, int64_t n, int64_t at, int64_t bytes, char* to) {
    const __mmask64 some = (uint64_t{1} << bytes % kStepBytes) - 1;
    for (int64_t r = 0; r < n; ++r, to += kCopyStride) {
        const char* from = static_cast<const char*>(rows[r]) + at;
        int64_t i = 0;
        for (; i + kStepBytes <= bytes; i += kStepBytes)
            _mm512_store_si512(to + i, _mm512_loadu_si512(from + i));
        if (i < bytes) _mm512_store_si512(to + i, _mm512_maskz_loadu_epi8(some, from + i));
    }
}

// A stretch of K of a panel: whole steps, then a last one that zeros complete, if any.
struct Stretch {
    const uint8_t* lines;
    int64_t stride;  // between lines of a vector
    int64_t steps;
    const uint8_t* last;  // or null
    bool fetch;           // ask for the panel's next lines

    Stretch(const uint8_t* from, int64_t width, int64_t count, uint8_t* room, bool ahead)
        : lines(from), stride(width * 64), steps(count / kStepLines), last(nullptr), fetch(ahead) {
        const int64_t rest = count % kStepLines;
        if (rest == 0) return;
        __builtin_memcpy(room, lines + steps * kStepLines * stride,
                         static_cast<size_t>(rest * stride));
        __builtin_memset(room + rest * stride, 0,
                         static_cast<size_t>((kStepLines - rest) * stride));
        make_visible(room);
        last = room;
    }
    static constexpr int64_t kRoom = kStepLines * kPanelVectors * 64;

    void ask(const uint8_t* at) const {
        for (int64_t i = 0; i < kStepLines * stride; i += 64)
            __builtin_prefetch(at + kTilesAhead + i, 0, 2);
    }
};

// The unit's instructions name their tiles: no function can take them as arguments.
#define MOESTRO_TILE_PRODUCT(sum, x, w) \
    do {                                \
        if constexpr (kBf16)            \
            _tile_dpbf16ps(sum, x, w);  \
        else                            \
            _tile_dpbsud(sum, x, w);    \
    } while (false)

// One tile of rows by C vectors, a step of K.
template <bool kBf16, int C>
inline void step_of_one(const char* x, const uint8_t* w, int64_t stride) {
    _tile_loadd(4, x, kCopyStride);
    _tile_loadd(5, w, stride);
    MOESTRO_TILE_PRODUCT(0, 4, 5);
    if constexpr (C > 1) {
        _tile_loadd(6, w + 64, stride);
        MOESTRO_TILE_PRODUCT(1, 4, 6);
    }
    if constexpr (C > 2) {
        _tile_loadd(7, w + 128, stride);
        MOESTRO_TILE_PRODUCT(2, 4, 7);
    }
    if constexpr (C > 3) {
        _tile_loadd(5, w + 192, stride);
        MOESTRO_TILE_PRODUCT(3, 4, 5);
    }
}

// Two tiles of rows by C vectors.
template <bool kBf16, int C>
inline void step_of_two(const char* x, const char* x1, const uint8_t* w, int64_t stride) {
    _tile_loadd(4, x, kCopyStride);
    _tile_loadd(6, w, stride);
    MOESTRO_TILE_PRODUCT(0, 4, 6);
    _tile_loadd(5, x1, kCopyStride);
    MOESTRO_TILE_PRODUCT(2, 5, 6);
    if constexpr (C > 1) {
        _tile_loadd(7, w + 64, stride);
        MOESTRO_TILE_PRODUCT(1, 4, 7);
        MOESTRO_TILE_PRODUCT(3, 5, 7);
    }
}

#undef MOESTRO_TILE_PRODUCT

// sums[rows][C vectors] (+)= rows of x times a stretch. add: go on from what sums hold.
template <bool kBf16, int C>
void one_tile_of_rows(const Stretch& s, const char* x, char* sums, bool add) {
    _tile_zero(0);
    if constexpr (C > 1) _tile_zero(1);
    if constexpr (C > 2) _tile_zero(2);
    if constexpr (C > 3) _tile_zero(3);
    if (add) {
        _tile_loadd(0, sums, kSumStride);
        if constexpr (C > 1) _tile_loadd(1, sums + 64, kSumStride);
        if constexpr (C > 2) _tile_loadd(2, sums + 128, kSumStride);
        if constexpr (C > 3) _tile_loadd(3, sums + 192, kSumStride);
    }
    const uint8_t* w = s.lines;
    for (int64_t i = 0; i < s.steps; ++i, x += kStepBytes, w += kStepLines * s.stride) {
        if (s.fetch) s.ask(w);
        step_of_one<kBf16, C>(x, w, s.stride);
    }
    if (s.last != nullptr) step_of_one<kBf16, C>(x, s.last, s.stride);
    _tile_stored(0, sums, kSumStride);
    if constexpr (C > 1) _tile_stored(1, sums + 64, kSumStride);
    if constexpr (C > 2) _tile_stored(2, sums + 128, kSumStride);
    if constexpr (C > 3) _tile_stored(3, sums + 192, kSumStride);
}

// The same for two tiles of rows, m0 rows in the first; `vector`: the first of the panel's.
template <bool kBf16, int C>
void two_tiles_of_rows(const Stretch& s, int64_t vector, int64_t m0, const char* x, char* sums,
                       bool add) {
    const char* x1 = x + m0 * kCopyStride;
    sums += vector * 64;
    char* sums1 = sums + m0 * kSumStride;
    _tile_zero(0);
    _tile_zero(2);
    if constexpr (C > 1) {
        _tile_zero(1);
        _tile_zero(3);
    }
    if (add) {
        _tile_loadd(0, sums, kSumStride);
        _tile_loadd(2, sums1, kSumStride);
        if constexpr (C > 1) {
            _tile_loadd(1, sums + 64, kSumStride);
            _tile_loadd(3, sums1 + 64, kSumStride);
        }
    }
    const uint8_t* w = s.lines;
    const int64_t at = vector * 64;
    for (int64_t i = 0; i < s.steps; ++i, w += kStepLines * s.stride) {
        if (s.fetch && vector == 0) s.ask(w);
        step_of_two<kBf16, C>(x + i * kStepBytes, x1 + i * kStepBytes, w + at, s.stride);
    }
    if (s.last != nullptr)
        step_of_two<kBf16, C>(x + s.steps * kStepBytes, x1 + s.steps * kStepBytes, s.last + at,
                              s.stride);
    _tile_stored(0, sums, kSumStride);
    _tile_stored(2, sums1, kSumStride);
    if constexpr (C > 1) {
        _tile_stored(1, sums + 64, kSumStride);
        _tile_stored(3, sums1 + 64, kSumStride);
    }
}

// sums[rows][kOutStride] (+)= copied rows times all vectors of a stretch.
template <bool kBf16>
void multiply_stretch(const Stretch& s, const RowSplit& rows, const char* x, char* sums, bool add) {
    const int64_t width = s.stride / 64;
    if (rows.m1 > 0) {
        int64_t v = 0;
        for (; v + 2 <= width; v += 2) two_tiles_of_rows<kBf16, 2>(s, v, rows.m0, x, sums, add);
        if (v < width) two_tiles_of_rows<kBf16, 1>(s, v, rows.m0, x, sums, add);
    } else if (width == 4) {
        one_tile_of_rows<kBf16, 4>(s, x, sums, add);
    } else if (width == 3) {
        one_tile_of_rows<kBf16, 3>(s, x, sums, add);
    } else if (width == 2) {
        one_tile_of_rows<kBf16, 2>(s, x, sums, add);
    } else {
        one_tile_of_rows<kBf16, 1>(s, x, sums, add);
    }
}

// Calls fn(first row, number of rows), at most `most` at a time, evenly.
template <class Fn>
inline void for_row_blocks(int64_t n, int64_t most, Fn&& fn) {
    for (int64_t left = blocks(n, most), row = 0; left > 0; --left) {
        const int64_t rows = blocks(n - row, left);
        fn(row, rows);
        row += rows;
    }
}

// bf16 activations by bf16 or fp8 weights, any number of rows: see the head of this file. A block's
// sum starts from zero, as on vectors, and is added to those before it, a group's times its scales.
template <bool kFp8Weights>
void multiply_pairs_on_tiles(const PackedLayout& l, const uint8_t* panel, int64_t width,
                             const void* const* rows, int64_t n, float* out) {
    alignas(64) char x[kBlockRows * kCopyStride];
    alignas(64) float sums[kBlockRows * kOutStride];
    alignas(64) uint8_t room[Stretch::kRoom];
    alignas(64) uint8_t wide[kFp8Weights ? kBlockK / 2 * kPanelVectors * 64 : 64];
    TileShapes shapes;
    clear(out, n);
    for (int64_t i = 0; i < l.blocks(); ++i) {
        const uint8_t* head = panel + l.block_at(i, width);
        const uint8_t* from = head + l.block_head_bytes(width);
        const float* scales = l.group_scales() ? reinterpret_cast<const float*>(head) : nullptr;
        const int64_t first = i * l.block_lines;
        int64_t count = smaller(l.block_lines, l.lines - first);
        if constexpr (kFp8Weights) {
            decode_fp8_lines(from, width, count, wide);
            make_visible(wide);
            from = wide;
            count *= 2;
        }
        Stretch stretch(from, width, count, room, !kFp8Weights);
        for_row_blocks(n, kBlockRows, [&](int64_t row, int64_t num_rows) {
            const RowSplit tiles(num_rows);
            shapes.take(tiles);
            copy_rows(rows + row, num_rows, first * l.line_k * 2, count * 4, x);
            make_visible(x);
            multiply_stretch<true>(stretch, tiles, x, reinterpret_cast<char*>(sums), false);
            stretch.fetch = false;
            for (int64_t r = 0; r < num_rows; ++r)
                for (int64_t v = 0; v < width * kVectorRows; v += kVectorRows) {
                    float* at = out + (row + r) * kOutStride + v;
                    const Lanes sum = load_lanes(sums + r * kOutStride + v),
                                before = load_lanes(at);
                    store_lanes(at, scales == nullptr ? before + sum
                                                      : fma(sum, load_lanes(scales + v), before));
                }
        });
    }
    if (l.row_scales()) scale_rows(panel, width, n, out);
}

inline void multiply_int8_on_tiles(const PackedLayout& l, const uint8_t* panel, int64_t width,
                                   const void* const* rows, int64_t n, float* out) {
    if (n <= kMaxTileRows) return multiply_int8(l, panel, width, rows, n, out);
    alignas(64) char x[kBlockRows * kCopyStride];
    alignas(64) uint8_t room[Stretch::kRoom];
    constexpr int64_t kLinesAtOnce = kCopyBytes / 4;
    {
        TileShapes shapes;
        for (int64_t first = 0; first < l.lines; first += kLinesAtOnce) {
            const int64_t count = smaller(kLinesAtOnce, l.lines - first);
            Stretch stretch(panel + l.head_bytes(width) + first * width * 64, width, count, room,
                            true);
            for_row_blocks(n, kBlockRows, [&](int64_t row, int64_t num_rows) {
                const RowSplit tiles(num_rows);
                shapes.take(tiles);
                copy_rows(rows + row, num_rows, first * 4, count * 4, x);
                make_visible(x);
                // Integers until the last stretch is through.
                multiply_stretch<false>(stretch, tiles, x,
                                        reinterpret_cast<char*>(out + row * kOutStride), first > 0);
                stretch.fetch = false;
            });
        }
    }
    const float* scales = reinterpret_cast<const float*>(panel);
    for (int64_t r = 0; r < n; ++r) {
        const SignedRow row(rows[r], l.in_features, 1);
        for (int64_t v = 0; v < width * kVectorRows; v += kVectorRows) {
            float* at = out + r * kOutStride + v;
            const Sums sum = {_mm512_add_epi32(_mm512_loadu_si512(at), all_sums(row.starts[0]).v)};
            store_lanes(at, to_lanes(sum) * load_lanes(scales + v) * all_lanes(row.scale));
        }
    }
}

constexpr int64_t kNibbleK = 512;  // decoded at once; groups that are larger stay on vectors

// A group's codes minus its zeros (8 where it has none), in lines of 4 k: the sums that they give
// need no start.
template <bool zeros>
inline void decode_nibbles(const PackedLayout& l, const uint8_t* group, int64_t width,
                           uint8_t* to) {
    const uint8_t* from = group + l.block_head_bytes(width);
    const int64_t bytes = l.block_lines * width * 64;
    for (int64_t v = 0; v < width; ++v) {
        __m512i zero = _mm512_set1_epi8(8);
        if constexpr (zeros) zero = times_zeros(group + l.zeros_at(width) + v * 16, 0x01010101).v;
        for (int64_t i = v * 64; i < bytes; i += width * 64) {
            __builtin_prefetch(from + kAhead + i, 0, 3);
            const Codes line = load_codes(from + i);
            uint8_t* at = to + 2 * (i - v * 64) + v * 64;
            _mm512_store_si512(at, _mm512_sub_epi8(low_codes(line), zero));
            _mm512_store_si512(at + width * 64, _mm512_sub_epi8(high_codes(line), zero));
        }
    }
}

// What rows of x meet of a vector: decoded groups, all of one size.
struct Groups {
    const uint8_t* lines;   // of the vector, in the first group
    int64_t stride;         // between lines
    int64_t count, size;    // size: k of a group
    const void* scales;     // of the vector
    int64_t scales_stride;  // bytes between groups
};

// sums[rows][16] of one group: tile kSum is used.
template <int kSum>
inline void group_product(const Groups& g, int64_t group, const char* x, int32_t* sums) {
    x += group * g.size;
    const uint8_t* w = g.lines + group * g.size / 4 * g.stride;
    if constexpr (kSum == 0)
        _tile_zero(0);
    else
        _tile_zero(1);
    int64_t k = 0;
    for (; k + kStepBytes <= g.size; k += kStepBytes, w += kStepLines * g.stride) {
        _tile_loadd(4, x + k, kCopyStride);
        _tile_loadd(5, w, g.stride);
        if constexpr (kSum == 0)
            _tile_dpbssd(0, 4, 5);
        else
            _tile_dpbssd(1, 4, 5);
    }
    if (k < g.size) {
        _tile_loadd(6, x + k, kCopyStride);
        _tile_loadd(7, w, g.stride);
        if constexpr (kSum == 0)
            _tile_dpbssd(0, 6, 7);
        else
            _tile_dpbssd(1, 6, 7);
    }
    if constexpr (kSum == 0)
        _tile_stored(0, sums, 64);
    else
        _tile_stored(1, sums, 64);
}

// out[rows][16] += sums of the groups times their scales, in order. R: rows, or more; the sums over
// groups stay in registers.
template <class Scale, int R>
__attribute__((noinline)) void add_groups(const Groups& g, const char* x, int64_t rows,
                                          float* out) {
    alignas(64) int32_t sums[2][kTileRows * 16] = {};
    Lanes y[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) y[r] = r < rows ? load_lanes(out + r * kOutStride) : no_lanes();
    const auto add = [&](int64_t group, const int32_t* from) __attribute__((always_inline)) {
        const char* at = static_cast<const char*>(g.scales) + group * g.scales_stride;
        const Lanes scale = load_lanes(reinterpret_cast<const Scale*>(at));
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
            y[r] = fused(to_lanes(Sums{_mm512_load_si512(from + r * 16)}), scale, y[r]);
    };
    int64_t i = 0;
    for (; i + 2 <= g.count; i += 2) {  // the second product goes on while the first is added
        group_product<0>(g, i, x, sums[0]);
        group_product<1>(g, i + 1, x, sums[1]);
        add(i, sums[0]);
        add(i + 1, sums[1]);
    }
    if (i < g.count) {
        group_product<0>(g, i, x, sums[0]);
        add(i, sums[0]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
        if (r < rows) store_lanes(out + r * kOutStride, y[r]);
}

template <bool zeros, class Scale>
void multiply_nibbles_on_tiles(const PackedLayout& l, const uint8_t* panel, int64_t width,
                               const void* const* rows, int64_t n, float* out) {
    if (n <= kNibbleTileRows || l.group_size > kNibbleK)
        return multiply_nibbles<zeros, Scale>(l, panel, width, rows, n, out);
    alignas(64) char x[kTileRows * kCopyStride];
    alignas(64) uint8_t codes[kNibbleK / 4 * kPanelVectors * 64];
    const int64_t groups = l.blocks(), size = l.group_size, at_once = kNibbleK / size;
    const int64_t group_bytes = l.block_head_bytes(width) + l.block_lines * width * 64;
    clear(out, n);
    {
        TileShapes shapes;
        for (int64_t first = 0; first < groups; first += at_once) {
            const int64_t count = smaller(at_once, groups - first);
            const uint8_t* from = panel + first * group_bytes;
            for (int64_t i = 0; i < count; ++i)
                decode_nibbles<zeros>(l, from + i * group_bytes, width,
                                      codes + i * size / 4 * width * 64);
            make_visible(codes);
            for_row_blocks(n, kTileRows, [&](int64_t row, int64_t num_rows) {
                shapes.take_group(num_rows, size % kStepBytes);
                copy_rows(rows + row, num_rows, first * size, count * size, x);
                make_visible(x);
                for (int64_t v = 0; v < width; ++v) {
                    const Groups g{codes + v * 64,
                                   width * 64,
                                   count,
                                   size,
                                   reinterpret_cast<const Scale*>(from) + v * kVectorRows,
                                   group_bytes};
                    float* at = out + row * kOutStride + v * kVectorRows;
                    if (num_rows > kTileRows / 2)
                        add_groups<Scale, kTileRows>(g, x, num_rows, at);
                    else
                        add_groups<Scale, kTileRows / 2>(g, x, num_rows, at);
                }
            });
        }
    }
    for (int64_t r = 0; r < n; ++r) {
        const Lanes scale = all_lanes(SignedRow(rows[r], l.in_features, groups).scale);
        for (int64_t v = 0; v < width * kVectorRows; v += kVectorRows) {
            float* at = out + r * kOutStride + v;
            store_lanes(at, load_lanes(at) * scale);
        }
    }
}

// What multiplies on tiles, or null.
inline Multiply tile_product(const PackedLayout& l, bool bf16_rows) {
    switch (l.format) {
        case kW8A8:
            return multiply_int8_on_tiles;
        case kW4A8:
            if (l.has_zeros)
                return l.fp32_scales ? multiply_nibbles_on_tiles<true, float>
                                     : multiply_nibbles_on_tiles<true, bf16>;
            return l.fp32_scales ? multiply_nibbles_on_tiles<false, float>
                                 : multiply_nibbles_on_tiles<false, bf16>;
        case kBF16:
            return bf16_rows ? multiply_pairs_on_tiles<false> : nullptr;
        case kFP8:
            return bf16_rows ? multiply_pairs_on_tiles<true> : nullptr;
        default:
            return nullptr;
    }
}
