// Attention by vdpbf16ps: bf16 queries; keys and values in bf16, or codes that bf16 holds exactly.
//
// A tile's keys are turned into [pair of dims][position], so that sixteen positions lie in a
// vector's lanes, a query's pair is broadcast to them, and a score is one sum along D in a lane.
// Values become [pair of positions][dim], and a pair of probabilities is broadcast. Every output
// is a sum in one order whatever the rows beside it. Codes multiply as they are: a key's scale goes
// into the score, a value's into the probability. A probability enters the value product rounded
// to bf16; for bf16 values their sum takes the rounded ones too, so weights add up to 1.

// Sixty-four codes as bf16: two vectors, of which lane l has elements 16 l + 0..7 and 16 l + 8..15.
template <class TP>
struct CodeTable {
    __m512i high[2], low[2];  // bytes of the bf16 of codes 0..127

    CodeTable() {
        alignas(64) uint8_t h[128], l[128];
        for (int i = 0; i < 128; ++i) {
            TP code;
            code.bits = static_cast<decltype(code.bits)>(i);
            float value;
            decode_codes(&code, 1, &value);
            uint32_t u;
            __builtin_memcpy(&u, &value, 4);
            h[i] = static_cast<uint8_t>(u >> 24), l[i] = static_cast<uint8_t>(u >> 16);
        }
        for (int i = 0; i < 2; ++i) {
            high[i] = _mm512_load_si512(h + 64 * i);
            low[i] = _mm512_load_si512(l + 64 * i);
        }
    }

    void decode(__m512i codes, __m512i* out) const {
        const __m512i mag = std::is_same_v<TP, Int8Code> ? _mm512_abs_epi8(codes) : codes;
        const __m512i sign = _mm512_and_si512(codes, _mm512_set1_epi8(-128));
        const __m512i h = _mm512_or_si512(_mm512_permutex2var_epi8(high[0], mag, high[1]), sign);
        const __m512i l = _mm512_permutex2var_epi8(low[0], mag, low[1]);
        out[0] = _mm512_unpacklo_epi8(l, h);
        out[1] = _mm512_unpackhi_epi8(l, h);
    }
};

// bf16 needs no table. A chunk of a row is what one step of packing reads.
template <>
struct CodeTable<bf16> {};

template <class TP>
struct DotAttention : AttentionShape {
    static constexpr bool kCodes = is_code<TP>;
    static constexpr int64_t kChunk = kCodes ? 64 : 32;
    static constexpr int kParts = kCodes ? 2 : 1;  // vectors of 32 bf16 in a chunk
    static constexpr int64_t kFewRows = 16;
    int64_t padded;  // dim in whole chunks
    CodeTable<TP> table;

    explicit DotAttention(const AttentionArgs& args)
        : AttentionShape(args), padded(blocks(args.head_dim, kChunk) * kChunk) {}

    int64_t state_floats(int64_t rows) const { return rows * (padded + 2); }
    int64_t worker_floats() const {
        return kQueryRows * padded / 2 + kFewRows * padded / 2 + 2 * (kTile * padded / 2) +
               kQueryRows * kTile + kQueryRows * kTile / 2 + 2 * kTile +
               2 * state_floats(kQueryRows);
    }
    RowState state_at(float* at, int64_t rows) const { return {at, at + rows, at + 2 * rows}; }

    struct Buffers {
        bf16* q;           // [row][padded], in the order of packed keys
        uint32_t* lanes;   // [padded / 2][few_lanes]: the same of a few rows, a row a lane
        uint32_t* keys;    // [padded / 2][kTile]
        uint32_t* values;  // [kTile / 2][padded], in the order of packed values
        float* scores;     // [row][kTile]
        bf16* weights;     // [row][kTile]
        float *k_scales, *v_scales;
        RowState part, whole;  // sums in the order of packed values
    };

    Buffers buffers(float* at) const {
        Buffers b;
        const auto take = [&](int64_t floats) {
            float* here = at;
            at += floats;
            return here;
        };
        b.q = reinterpret_cast<bf16*>(take(kQueryRows * padded / 2));
        b.lanes = reinterpret_cast<uint32_t*>(take(kFewRows * padded / 2));
        b.keys = reinterpret_cast<uint32_t*>(take(kTile * padded / 2));
        b.values = reinterpret_cast<uint32_t*>(take(kTile * padded / 2));
        b.scores = take(kQueryRows * kTile);
        b.weights = reinterpret_cast<bf16*>(take(kQueryRows * kTile / 2));
        b.k_scales = take(kTile);
        b.v_scales = take(kTile);
        b.part = state_at(take(state_floats(kQueryRows)), kQueryRows);
        b.whole = state_at(take(state_floats(kQueryRows)), kQueryRows);
        return b;
    }

    static __mmask32 words(int64_t n) {
        return n >= 32 ? ~__mmask32{0} : n <= 0 ? 0 : static_cast<__mmask32>((1u << n) - 1);
    }
    static __mmask64 bytes(int64_t n) {
        return n >= 64 ? ~__mmask64{0} : static_cast<__mmask64>((uint64_t{1} << n) - 1);
    }

    void load_queries(const QueryBlock& block, const Buffers& b) const {
        for (int64_t r = 0; r < block.rows; ++r) {
            const bf16* from = static_cast<const bf16*>(a.q) + row_offset(block, r);
            bf16* to = b.q + r * padded;
            for (int64_t d = 0; d < padded; d += kChunk)
                for (int part = 0; part < kParts; ++part) {
                    const int64_t at = d + 32 * part;
                    const __m512i x = _mm512_maskz_loadu_epi16(words(dim - at), from + at);
                    _mm512_storeu_si512(to + at, x);
                }
            if (kCodes) reorder(to);
        }
        if (is_few(block))
            lay_rows_in_lanes(b.q, padded, block.rows, few_lanes(), padded / 2, b.lanes);
    }

    // Whether a block is one token whose heads are few enough to leave its tiles unpacked.
    bool is_few(const QueryBlock& block) const {
        return block.rows == group && group <= kFewRows && dim == padded;
    }
    int64_t few_lanes() const { return group <= 8 ? 8 : 16; }

    // scores of a few rows; positions from n on are anything finite.
    template <int Lanes>
    void score_few(const TP* const* rows, int64_t n, const TP* const* next, int64_t more,
                   const Buffers& b) const {
        bf16* copy = reinterpret_cast<bf16*>(b.keys);
        for (int64_t j = 0; j < n; j += 16) {
            const bf16* keys = copy;
            if constexpr (!kCodes)
                if (n - j >= 16 && rows[j + 15] == rows[j] + 15 * dim) keys = rows[j];
            if (keys == copy)
                for (int64_t i = 0; i < 16; ++i)
                    copy_row(j + i < n ? rows[j + i] : nullptr, copy + i * dim);
            const TP* ahead = j < more ? next[j] : rows[j];
            score_sixteen<Lanes>(b.lanes, keys, dim, dim / 2, reinterpret_cast<const char*>(ahead),
                                 32 * sizeof(TP), b.scores + j, kTile);
        }
    }

    // A key as bf16 in the order of packed keys; none is zeros.
    void copy_row(const TP* row, bf16* to) const {
        for (int64_t d = 0; d < dim; d += kChunk) {
            __m512i x[kParts] = {};
            if (row != nullptr) read_whole(row + d, x);
            for (int part = 0; part < kParts; ++part)
                _mm512_storeu_si512(to + d + 32 * part, x[part]);
        }
    }

    // A query into the order in which codes come out of the table.
    void reorder(bf16* q) const {
        alignas(64) uint16_t index[2][32];
        for (int part = 0; part < 2; ++part)
            for (int i = 0; i < 32; ++i)
                index[part][i] = static_cast<uint16_t>(i / 8 * 16 + part * 8 + i % 8);
        for (int64_t d = 0; d < padded; d += 64) {
            const __m512i x = _mm512_loadu_si512(q + d), y = _mm512_loadu_si512(q + d + 32);
            for (int part = 0; part < 2; ++part)
                _mm512_storeu_si512(q + d + 32 * part, _mm512_permutex2var_epi16(
                                                           x, _mm512_load_si512(index[part]), y));
        }
    }

    // The chunk at d of one row, as kParts vectors of bf16; zeros beyond dim.
    void read_chunk(const TP* row, int64_t d, __m512i* out) const {
        if constexpr (kCodes)
            table.decode(_mm512_maskz_loadu_epi8(bytes(dim - d), row + d), out);
        else
            out[0] = _mm512_maskz_loadu_epi16(words(dim - d), row + d);
    }

    void read_whole(const TP* at, __m512i* out) const {
        const __m512i x = _mm512_loadu_si512(at);
        if constexpr (kCodes)
            table.decode(x, out);
        else
            out[0] = x;
    }

    // The next tile's rows, a line at a time, while this one's are packed.
    void prefetch_rows(const TP* const* rows, int64_t begin, int64_t end) const {
        for (int64_t j = begin; j < end; ++j)
            for (int64_t d = 0; d < dim; d += 64 / static_cast<int64_t>(sizeof(TP)))
                __builtin_prefetch(rows[j] + d, 0, 2);
    }

    // keys[pair][position] of a tile; positions from n on are zero. next: `more` rows soon to be
    // read.
    void pack_keys(const TP* const* rows, int64_t n, const TP* const* next, int64_t more,
                   const Buffers& b) const {
        for (int64_t j = 0; j < n; j += 16) {
            prefetch_rows(next, j, smaller(j + 16, more));
            for (int64_t d = 0; d < padded; d += kChunk) {
                const bool whole = n - j >= 16 && d + kChunk <= dim;
                __m512i in[kParts][16], out[16];
                for (int64_t i = 0; i < 16; ++i) {
                    __m512i chunk[kParts] = {};
                    if (whole)
                        read_whole(rows[j + i] + d, chunk);
                    else if (j + i < n)
                        read_chunk(rows[j + i], d, chunk);
                    for (int part = 0; part < kParts; ++part) in[part][i] = chunk[part];
                }
                for (int part = 0; part < kParts; ++part) {
                    transpose16(in[part], out);
                    uint32_t* to = b.keys + (d / 2 + 16 * part) * kTile + j;
                    for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * kTile, out[i]);
                }
            }
        }
    }

    // values[pair][dim]: the two positions' numbers side by side; a missing second one is zero.
    void pack_values(const TP* const* rows, int64_t n, const TP* const* next, int64_t more,
                     const Buffers& b) const {
        for (int64_t j = 0; j < n; j += 2) {
            prefetch_rows(next, j, smaller(j + 2, more));
            for (int64_t d = 0; d < padded; d += kChunk) {
                __m512i x[kParts] = {}, y[kParts] = {};
                if (j + 1 < n && d + kChunk <= dim) {
                    read_whole(rows[j] + d, x);
                    read_whole(rows[j + 1] + d, y);
                } else {
                    read_chunk(rows[j], d, x);
                    if (j + 1 < n) read_chunk(rows[j + 1], d, y);
                }
                uint32_t* to = b.values + j / 2 * padded + d;
                for (int part = 0; part < kParts; ++part) {
                    _mm512_storeu_si512(to + 32 * part, _mm512_unpacklo_epi16(x[part], y[part]));
                    _mm512_storeu_si512(to + 32 * part + 16,
                                        _mm512_unpackhi_epi16(x[part], y[part]));
                }
            }
        }
    }

    // Which dim lies at element e of packed values.
    static int64_t dim_at(int64_t e) {
        const int64_t part = e / 16 % (2 * kParts), lane = e % 16 / 4, i = e % 4;
        if (kCodes) return e / 64 * 64 + 16 * lane + 4 * part + i;
        return e / 32 * 32 + 8 * lane + 4 * part + i;
    }

    // c[r][16 lanes x C] = (Add: +) sum over pairs of x[r][pair] * y[pair][lanes]. Half: one pair
    // more, whose second number counts for nothing.
    template <int R, int C, bool Add, bool Half>
    static void dot_block(const bf16* x, int64_t ldx, const uint32_t* y, int64_t ldy, int64_t pairs,
                          float* c, int64_t ldc) {
        __m512 acc[R][C];
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < C; ++i)
                acc[r][i] = Add ? _mm512_loadu_ps(c + r * ldc + 16 * i) : _mm512_setzero_ps();
        for (int64_t p = 0; p < pairs + Half; ++p) {
            __m512bh v[C];
            const __m512i kept = _mm512_set1_epi32(Half && p == pairs ? 0xffff : -1);
            for (int i = 0; i < C; ++i) {
                const __m512i u = _mm512_loadu_si512(y + p * ldy + 16 * i);
                v[i] = (__m512bh)(Half ? _mm512_and_si512(u, kept) : u);
            }
            for (int r = 0; r < R; ++r) {
                int32_t pair;
                __builtin_memcpy(&pair, x + r * ldx + 2 * p, 4);
                const __m512bh s = (__m512bh)_mm512_set1_epi32(pair);
                for (int i = 0; i < C; ++i) acc[r][i] = _mm512_dpbf16_ps(acc[r][i], s, v[i]);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < C; ++i) _mm512_storeu_ps(c + r * ldc + 16 * i, acc[r][i]);
    }

    template <int R, int C, bool Add, bool Half>
    static void dot_rows(const bf16* x, int64_t ldx, const uint32_t* y, int64_t ldy, int64_t pairs,
                         int64_t lanes, float* c, int64_t ldc) {
        int64_t i = 0;
        for (; i + 16 * C <= lanes; i += 16 * C)
            dot_block<R, C, Add, Half>(x, ldx, y + i, ldy, pairs, c + i, ldc);
        for (; i < lanes; i += 32)
            dot_block<R, 2, Add, Half>(x, ldx, y + i, ldy, pairs, c + i, ldc);
    }

    // n rows; lanes in whole 32.
    template <bool Add, bool Half>
    static void dot(const bf16* x, int64_t ldx, int64_t n, const uint32_t* y, int64_t ldy,
                    int64_t pairs, int64_t lanes, float* c, int64_t ldc) {
        int64_t r = 0;
        const auto take = [&](auto kind, int64_t count) {
            using Kind = decltype(kind);
            dot_rows<Kind::kRows, Kind::kVectors, Add, Half>(x + r * ldx, ldx, y, ldy, pairs, lanes,
                                                             c + r * ldc, ldc);
            r += count;
        };
        while (r + 8 <= n) take(Block<8, 2>(), 8);
        if (n - r >= 4) take(Block<4, 4>(), 4);
        if (n - r >= 2) take(Block<2, 8>(), 2);
        if (n - r >= 1) take(Block<1, 8>(), 1);
    }

    // Takes a tile's scores of rows that see `valid` of its positions into their states. In passes
    // over the rows, because a row alone is a chain of steps that wait for each other.
    template <bool Whole>
    void soften(const Buffers& b, int64_t valid, bool fresh, int64_t begin, int64_t end) const {
        float before[kQueryRows];
        for (int64_t r = begin; r < end; ++r) {
            before[r - begin] = fresh ? -__builtin_inff() : b.part.highest[r];
            const float here = scale_row<Whole>(b, valid, r);
            b.part.highest[r] = before[r - begin] > here ? before[r - begin] : here;
        }
        for (int64_t r = begin; r < end; r += 4) {
            F totals[4] = {zero(), zero(), zero(), zero()};
            const int64_t n = smaller(4, end - r);
            for (int64_t i = 0; i < n; ++i) totals[i] = weigh_row<Whole>(b, valid, r + i);
            float sums[4];
            hsum4(totals, sums);
            for (int64_t i = 0; i < n; ++i)
                add_sum(b, fresh, before[r - begin + i], sums[i], r + i);
        }
    }

    // Vector i of a tile's row: how many of its positions are seen.
    template <bool Whole>
    static int64_t seen_of(int64_t valid, int64_t i) {
        return Whole ? 16 : valid - 16 * i < 0 ? 0 : smaller(16, valid - 16 * i);
    }

    // A row's scores times their scale, minus infinity where they are not seen; the largest.
    template <bool Whole>
    float scale_row(const Buffers& b, int64_t valid, int64_t row) const {
        float* scores = b.scores + row * kTile;
        F x[kTile / 16];
        for (int64_t i = 0; i < kTile / 16; ++i) {
            x[i] = load(scores + 16 * i) * (kCodes ? load(b.k_scales + 16 * i) : set1(a.scale));
            if (!Whole) x[i] = keep_n(x[i], seen_of<Whole>(valid, i), -__builtin_inff());
            store(scores + 16 * i, x[i]);
        }
        return _mm512_reduce_max_ps(max(max(x[0], x[1]), max(x[2], x[3])).v);
    }

    // A row's probabilities into its weights; what is to be added up to their sum.
    template <bool Whole>
    F weigh_row(const Buffers& b, int64_t valid, int64_t row) const {
        const float* scores = b.scores + row * kTile;
        const F highest = set1(b.part.highest[row]);
        F p[kTile / 16];
        for (int64_t i = 0; i < kTile / 16; ++i) p[i] = exp(load(scores + 16 * i) - highest);
        for (int64_t i = 0; i < kTile / 16; ++i) {
            F weight = p[i];
            if (kCodes) weight = weight * load(b.v_scales + 16 * i);
            if (kCodes && !Whole) weight = keep_n(weight, seen_of<Whole>(valid, i), 0.0f);
            const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(weight.v);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(b.weights + row * kTile + 16 * i),
                                rounded);
            if (!kCodes) p[i] = widen(rounded, static_cast<const bf16*>(nullptr));
        }
        return (p[0] + p[1]) + (p[2] + p[3]);
    }

    // A tile's sum into a row's state, whose values then wait for the tile's.
    void add_sum(const Buffers& b, bool fresh, float before, float sum, int64_t row) const {
        const RowState& s = b.part;
        float* acc = s.acc + row * padded;
        if (fresh) {
            s.sum[row] = sum;
            for (int64_t i = 0; i < padded; i += 16) store(acc + i, zero());
        } else if (before == s.highest[row]) {
            s.sum[row] += sum;  // the factor is 1, and multiplying by it changes no bit
        } else {
            const F keep = exp(set1(before - s.highest[row]));
            s.sum[row] = s.sum[row] * _mm512_cvtss_f32(keep.v) + sum;
            for (int64_t i = 0; i < padded; i += 16) store(acc + i, load(acc + i) * keep);
        }
    }

    // Rows [first, rows) of a tile of n positions at start.
    void take_tile(const QueryBlock& block, int64_t start, bool fresh, const Buffers& b) const {
        const int64_t n = smaller(kTile, block.last_position + 1 - start);
        const TP *keys[kTile], *values[kTile], *next_keys[kTile], *next_values[kTile];
        find_keys(block, start, n, keys);
        find_values(block, start, n, values);
        const int64_t left = block.last_position + 1 - (start + kTile);
        const int64_t more = left < 0 ? 0 : smaller(kTile, left);
        find_keys(block, start + kTile, more, next_keys);
        find_values(block, start + kTile, more, next_values);
        if (kCodes) {
            find_scales(block, start, n, b.k_scales, b.v_scales);
            for (int64_t j = 0; j < n; ++j) b.k_scales[j] *= a.scale;
        }
        if (is_few(block)) {
            few_lanes() == 8 ? score_few<8>(keys, n, next_keys, more, b)
                             : score_few<16>(keys, n, next_keys, more, b);
            n == kTile ? soften<true>(b, n, fresh, 0, group) : soften<false>(b, n, fresh, 0, group);
            weigh_values(values, n, more == kTile ? next_values : values, b);
            return;
        }
        const int64_t first = first_row(block, start), seen = blocks(n, 32) * 32;
        pack_keys(keys, n, next_keys, more, b);
        dot<false, false>(b.q + first * padded, padded, block.rows - first, b.keys, kTile,
                          padded / 2, seen, b.scores + first * kTile, kTile);
        pack_values(values, n, next_values, more, b);
        int64_t valid = smaller(kTile, block.first_position + first / group + 1 - start);
        for (int64_t r = first; r < block.rows; ++valid) {
            // The rows of one token see the same positions; so do all once a token sees them all.
            const int64_t rows = valid == kTile ? block.rows - r : group;
            valid == kTile ? soften<true>(b, valid, fresh, r, r + rows)
                           : soften<false>(b, valid, fresh, r, r + rows);
            const auto weigh = valid % 2 == 0 ? dot<true, false> : dot<true, true>;
            weigh(b.weights + r * kTile, kTile, rows, b.values, padded, valid / 2, padded,
                  b.part.acc + r * padded, padded);
            r += rows;
        }
    }

    // What a tile's values add to the sums of a few rows.
    void weigh_values(const TP* const* values, int64_t n, const TP* const* next,
                      const Buffers& b) const {
        if constexpr (kCodes) {
            pack_values(values, n, next, n, b);
            const auto weigh = n % 2 == 0 ? dot<true, false> : dot<true, true>;
            weigh(b.weights, kTile, group, b.values, padded, n / 2, padded, b.part.acc, padded);
        } else {
            weigh_few(b.weights, kTile, group, values, n, dim, next, b.part.acc, padded);
        }
    }

    int64_t take_super(const QueryBlock& block, int64_t super, const Buffers& b) const {
        const int64_t stop = smaller(block.last_position + 1, (super + 1) * kSuper);
        for (int64_t start = super * kSuper; start < stop; start += kTile)
            take_tile(block, start, start == super * kSuper, b);
        return first_row(block, super * kSuper);
    }

    // whole <- whole merged with the next super-tile's state, for rows from `from` on.
    void merge(const RowState& part, int64_t from, int64_t rows, bool start,
               const RowState& whole) const {
        for (int64_t r = from; r < rows; ++r) {
            float* acc = whole.acc + r * padded;
            const float* more = part.acc + r * padded;
            if (start) {
                whole.highest[r] = part.highest[r];
                whole.sum[r] = part.sum[r];
                for (int64_t i = 0; i < padded; i += 16) store(acc + i, load(more + i));
                continue;
            }
            const float before = whole.highest[r], here = part.highest[r];
            const float highest = before > here ? before : here;
            const F keep = exp(set1(before - highest)), take = exp(set1(here - highest));
            whole.highest[r] = highest;
            whole.sum[r] =
                whole.sum[r] * _mm512_cvtss_f32(keep.v) + part.sum[r] * _mm512_cvtss_f32(take.v);
            for (int64_t i = 0; i < padded; i += 16)
                store(acc + i, fma(load(more + i), take, load(acc + i) * keep));
        }
    }

    void write(const QueryBlock& block, const RowState& s) const {
        for (int64_t r = 0; r < block.rows; ++r) {
            bf16* to = static_cast<bf16*>(a.out) + row_offset(block, r);
            const F sum = set1(s.sum[r]);
            for (int64_t e = 0; e < padded; e += kChunk) {
                alignas(64) float row[kChunk];
                for (int64_t i = 0; i < kChunk; i += 16) {
                    float lanes[16];
                    store(lanes, load(s.acc + r * padded + e + i) / sum);
                    for (int64_t l = 0; l < 16; ++l) row[dim_at(e + i + l) - e] = lanes[l];
                }
                for (int64_t i = 0; i < kChunk && e + i < dim; i += 16)
                    store_some(to + e + i, load(row + i), smaller(16, dim - e - i));
            }
        }
    }

    void run_block(const QueryBlock& block, const Buffers& b) const {
        load_queries(block, b);
        for (int64_t super = 0; super < block.supers; ++super) {
            const int64_t from = take_super(block, super, b);
            merge(b.part, from, block.rows, super == 0, b.whole);
        }
        write(block, b.whole);
    }
};
