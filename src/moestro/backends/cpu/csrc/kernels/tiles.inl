// The tile unit (AMX-BF16): shapes of its registers.

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileK = 32;

// The tile shapes in force: 0-3 sums, 4-5 rows of w, 6-7 packed rows of x.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// The tile intrinsics do not tell the compiler that they read memory.
inline void make_visible(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

// Shapes for w0 and w1 rows of w, x0 and x1 rows of x (0: the tile is not used).
inline void configure_tiles(int64_t w0, int64_t w1, int64_t x0, int64_t x1) {
    TileConfig config;
    const int64_t w[2] = {w0, w1}, x[2] = {x0, x1};
    for (int i = 0; i < 2; ++i) {
        config.rows[4 + i] = static_cast<uint8_t>(w[i]);
        config.row_bytes[4 + i] = w[i] > 0 ? 64 : 0;
        config.rows[6 + i] = x[i] > 0 ? 16 : 0;
        config.row_bytes[6 + i] = static_cast<uint16_t>(4 * x[i]);
        for (int j = 0; j < 2; ++j) {
            const bool used = w[i] > 0 && x[j] > 0;
            config.rows[2 * i + j] = static_cast<uint8_t>(used ? w[i] : 0);
            config.row_bytes[2 * i + j] = static_cast<uint16_t>(used ? 4 * x[j] : 0);
        }
    }
    make_visible(&config);
    _tile_loadconfig(&config);
}

// Rows of x as a tile wants them, [chunk][pair of k][row]: `rows` rows, then zeros up to `width` of
// them.
inline void pack_tile_rows(const bf16* const* x, int64_t rows, int64_t width, int64_t K,
                           bf16* packed) {
    const __mmask16 lanes = first(width);
    for (int64_t k = 0; k < K; k += kTileK) {
        const int64_t count = smaller(kTileK, K - k);
        const __mmask32 some = static_cast<__mmask32>((uint64_t{1} << count) - 1);
        __m512i in[16], out[16];
        for (int64_t r = 0; r < 16; ++r)
            in[r] = r < rows ? _mm512_maskz_loadu_epi16(some, x[r] + k) : _mm512_setzero_si512();
        transpose16(in, out);
        for (int64_t p = 0; p < 16; ++p)
            _mm512_mask_storeu_epi32(packed + (k + 2 * p) * width, lanes, out[p]);
    }
}
