// Attention with bf16 queries, keys and values on the tile unit.
//
// Everything is turned on its side: scores are [position, row] and outputs [D, row], sixteen rows
// in a vector's lanes, so the softmax of a row never leaves its lane. Keys are read where they lie;
// values are transposed once a tile. Probabilities enter the product as the sum of two bf16
// numbers, which keeps about 16 bits of them. Each tile's product starts from zero and is added to
// the rows that see the tile.

constexpr int64_t kLanes = 16;
constexpr int64_t kRowGroups = kQueryRows / kLanes;

struct TileAttention : AttentionShape {
    int64_t key_chunks;    // of 32 elements of D
    int64_t value_groups;  // of 16 elements of D

    explicit TileAttention(const AttentionArgs& args)
        : AttentionShape(args),
          key_chunks(blocks(args.head_dim, kTileK)),
          value_groups(blocks(args.head_dim, kLanes)) {}

    // acc: [row group][value_groups * 16][row]
    int64_t group_floats() const { return value_groups * kLanes * kLanes; }
    int64_t state_floats(int64_t rows) const { return rows * (2 + value_groups * kLanes); }
    int64_t worker_floats() const {
        return kQueryRows +                         // ends
               kRowGroups * key_chunks * 256 +      // q
               kRowGroups * kTile * kLanes +        // scores
               kRowGroups * kTile * kLanes +        // high and low probabilities
               value_groups * kTile * kLanes / 2 +  // values
               kLanes * key_chunks * kTileK +       // keys that do not lie in one piece
               2 * group_floats() + 2 * state_floats(kQueryRows);
    }

    // rows: whole groups.
    RowState state_at(float* at, int64_t rows) const { return {at, at + rows, at + 2 * rows}; }

    struct Buffers {
        int32_t* ends;        // [row], the position after the row's own
        bf16* q;              // [row group][chunk][pair][row]
        float* scores;        // [row group][position][row]
        __m512i *high, *low;  // [row group][pair of positions], a row's pair in each lane
        bf16* values;         // [value group][half of the tile][d][position]
        bf16* keys;           // two times [position][D padded]
        float* product;       // as acc, of two row groups
        RowState part, whole;
    };

    Buffers buffers(float* at) const {
        Buffers b;
        const auto take = [&](int64_t floats) {
            float* here = at;
            at += floats;
            return here;
        };
        b.ends = reinterpret_cast<int32_t*>(take(kQueryRows));
        b.q = reinterpret_cast<bf16*>(take(kRowGroups * key_chunks * 256));
        b.scores = take(kRowGroups * kTile * kLanes);
        b.high = reinterpret_cast<__m512i*>(take(kRowGroups * kTile / 2 * kLanes));
        b.low = reinterpret_cast<__m512i*>(take(kRowGroups * kTile / 2 * kLanes));
        b.values = reinterpret_cast<bf16*>(take(value_groups * kTile * kLanes / 2));
        b.keys = reinterpret_cast<bf16*>(take(kLanes * key_chunks * kTileK));
        b.product = take(2 * group_floats());
        b.part = state_at(take(state_floats(kQueryRows)), kQueryRows);
        b.whole = state_at(take(state_floats(kQueryRows)), kQueryRows);
        return b;
    }

    void load_queries(const QueryBlock& block, const Buffers& b) const {
        for (int64_t r = 0; r < block.rows; r += kLanes) {
            const bf16* rows[kLanes];
            const int64_t n = smaller(kLanes, block.rows - r);
            for (int64_t i = 0; i < n; ++i)
                rows[i] = static_cast<const bf16*>(a.q) + row_offset(block, r + i);
            pack_tile_rows(rows, n, kLanes, dim, b.q + r * key_chunks * kTileK);
        }
        make_visible(b.q);
        // Lanes without a row see what the last row sees; nobody reads them.
        const int32_t stop = static_cast<int32_t>(block.last_position + 1);
        for (int64_t r = 0; r < kQueryRows; ++r) b.ends[r] = stop;
        for (int64_t r = 0, end = block.first_position + 1; r < block.rows; r += group, ++end)
            for (int64_t i = r; i < r + group; ++i) b.ends[i] = static_cast<int32_t>(end);
    }

    // Sixteen keys, of which n were stored: in place, or copied with zeros around them.
    const bf16* sixteen_keys(const bf16* const* rows, int64_t n, bf16* copy,
                             int64_t* stride) const {
        bool together = n >= kLanes && dim % kTileK == 0;
        for (int64_t j = 1; together && j < kLanes; ++j)
            together = rows[j] == rows[0] + j * a.pages.k_slot_stride;
        if (together) {
            *stride = a.pages.k_slot_stride * 2;
            return rows[0];
        }
        const int64_t padded = key_chunks * kTileK;
        __builtin_memset(copy, 0, static_cast<size_t>(kLanes * padded) * 2);
        for (int64_t j = 0; j < smaller(n, kLanes); ++j)
            __builtin_memcpy(copy + j * padded, rows[j], static_cast<size_t>(dim) * 2);
        make_visible(copy);
        *stride = padded * 2;
        return copy;
    }

    // scores[group][position][row] for the n positions of a tile and groups [g0, g1) of rows.
    void score(const QueryBlock& block, int64_t start, int64_t n, int64_t g0, int64_t g1,
               const Buffers& b) const {
        const bf16* rows[kTile];
        find_keys(block, start, n, rows);
        const int64_t padded = key_chunks * kTileK;
        for (int64_t j = 0; j < n; j += 2 * kLanes) {
            const int64_t more = n - j - kLanes;
            int64_t s0 = 0, s1 = 0;
            const bf16* k0 = sixteen_keys(rows + j, n - j, b.keys, &s0);
            const bf16* k1 = nullptr;
            if (more > 0) k1 = sixteen_keys(rows + j + kLanes, more, b.keys + kLanes * padded, &s1);
            for (int64_t g = g0; g < g1; g += 2) {
                const bf16* q = b.q + g * kLanes * padded;
                float* to = b.scores + (g * kTile + j) * kLanes;
                if (g + 1 < g1)
                    more > 0 ? score_tiles<true, true>(k0, s0, k1, s1, q, to)
                             : score_tiles<false, true>(k0, s0, k1, s1, q, to);
                else
                    more > 0 ? score_tiles<true, false>(k0, s0, k1, s1, q, to)
                             : score_tiles<false, false>(k0, s0, k1, s1, q, to);
            }
        }
    }

    // Sixteen keys, and (K1) sixteen more, by one group of rows, and (Q1) the next.
    template <bool K1, bool Q1>
    void score_tiles(const bf16* k0, int64_t s0, const bf16* k1, int64_t s1, const bf16* q,
                     float* to) const {
        const bf16* q1 = q + kLanes * key_chunks * kTileK;
        _tile_zero(0);
        if (Q1) _tile_zero(1);
        if (K1) _tile_zero(2);
        if (K1 && Q1) _tile_zero(3);
        for (int64_t c = 0; c < key_chunks; ++c) {
            _tile_loadd(6, q + c * 512, 64);
            _tile_loadd(4, k0 + c * kTileK, s0);
            _tile_dpbf16ps(0, 4, 6);
            if (K1) _tile_loadd(5, k1 + c * kTileK, s1);
            if (K1) _tile_dpbf16ps(2, 5, 6);
            if (Q1) _tile_loadd(7, q1 + c * 512, 64);
            if (Q1) _tile_dpbf16ps(1, 4, 7);
            if (K1 && Q1) _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, to, 64);
        if (Q1) _tile_stored(1, to + kTile * kLanes, 64);
        if (K1) _tile_stored(2, to + kLanes * kLanes, 64);
        if (K1 && Q1) _tile_stored(3, to + (kTile + kLanes) * kLanes, 64);
    }

    // values[group][half][d][position of the half]; zeros from position n on.
    void load_values(const QueryBlock& block, int64_t start, int64_t n, const Buffers& b) const {
        const bf16* rows[kTile];
        find_values(block, start, n, rows);
        for (int64_t g = 0; g < value_groups; ++g) {
            const int64_t d = g * kLanes;
            const __mmask16 some = first(smaller(kLanes, dim - d));
            for (int64_t half = 0; half < 2; ++half) {
                const bf16* const* here = rows + half * kTile / 2;
                const int64_t count = n - half * kTile / 2;
                __m512i in[16], out[16];
                if (count >= kTile / 2 && some == 0xffff)
                    for (int64_t p = 0; p < 16; ++p)
                        in[p] =
                            pair_of(widen_bits(here[2 * p] + d), widen_bits(here[2 * p + 1] + d));
                else
                    for (int64_t p = 0; p < 16; ++p)
                        in[p] = pair_of(widen_some(here, 2 * p, count, d, some),
                                        widen_some(here, 2 * p + 1, count, d, some));
                transpose16(in, out);
                bf16* to = b.values + (g * 2 + half) * 512;
                for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * 32, out[i]);
            }
        }
        make_visible(b.values);
    }

    static __m512i widen_bits(const bf16* p) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static __m512i widen_some(const bf16* const* rows, int64_t j, int64_t n, int64_t d,
                              __mmask16 some) {
        if (j >= n) return _mm512_setzero_si512();
        return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, rows[j] + d));
    }
    static __m512i pair_of(__m512i even, __m512i odd) {
        return _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
    }

    // How many of a tile's positions each row of group g sees.
    static __m512i visible(int64_t start, int64_t g, const Buffers& b) {
        const __m512i ends = _mm512_load_si512(b.ends + g * kLanes);
        const __m512i seen = _mm512_sub_epi32(ends, _mm512_set1_epi32(static_cast<int>(start)));
        return _mm512_max_epi32(seen, _mm512_setzero_si512());
    }

    // Softmax of one group of rows over n positions: probabilities as two bf16 parts, new maxima
    // and sums, and what the earlier sums are to be multiplied by. Masked: not all rows see all n.
    template <bool Masked>
    F soften(int64_t start, int64_t n, bool fresh, int64_t g, const Buffers& b) const {
        const float* scores = b.scores + g * kTile * kLanes;
        const __m512i seen = visible(start, g, b);
        const F none = set1(-__builtin_inff()), scale = set1(a.scale);
        const auto show = [&](F x, int64_t j) {
            if (!Masked) return x;
            const __m512i at = _mm512_set1_epi32(static_cast<int>(j));
            return F{_mm512_mask_mov_ps(none.v, _mm512_cmpgt_epi32_mask(seen, at), x.v)};
        };
        F top = none;
        for (int64_t j = 0; j < n; ++j) top = max(top, show(load(scores + j * kLanes) * scale, j));
        const F before = fresh ? none : load(b.part.highest + g * kLanes);
        const F highest = max(before, top);
        // A row that sees nothing yet has no maximum; its probabilities are zero.
        const __mmask16 empty = _mm512_cmp_ps_mask(highest.v, none.v, _CMP_EQ_OQ);
        const F base = {_mm512_mask_mov_ps(highest.v, empty, _mm512_setzero_ps())};
        const F minus = neg(base);
        F sums[2] = {zero(), zero()};
        __m512i *high = b.high + g * kTile / 2, *low = b.low + g * kTile / 2;
        for (int64_t j = 0; j < n; j += 2) {
            const float* at = scores + j * kLanes;
            const F even = exp(show(fma(load(at), scale, minus), j));
            F odd = zero();
            if (j + 1 < n) odd = exp(show(fma(load(at + kLanes), scale, minus), j + 1));
            sums[0] = sums[0] + even;
            sums[1] = sums[1] + odd;
            split_pair(even, odd, high + j / 2, low + j / 2);
        }
        for (int64_t p = (n + 1) / 2; p < kTile / 2; ++p) high[p] = low[p] = _mm512_setzero_si512();
        const F total = sums[0] + sums[1];
        const F keep = fresh ? zero() : exp(before - base);
        const F sum = fresh ? total : fma(load(b.part.sum + g * kLanes), keep, total);
        store(b.part.sum + g * kLanes, sum);
        store(b.part.highest + g * kLanes, highest);
        return keep;
    }

    // Two positions' probabilities as bf16 pairs: p = high + low up to 2^-17 p.
    static void split_pair(F even, F odd, __m512i* high, __m512i* low) {
        const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
        const __m512i half = _mm512_set1_epi32(0x8000);
        const __m512i e = _mm512_and_si512(_mm512_castps_si512(even.v), upper);
        const __m512i o = _mm512_and_si512(_mm512_castps_si512(odd.v), upper);
        _mm512_store_si512(high, _mm512_or_si512(_mm512_srli_epi32(e, 16), o));
        const __m512 le = _mm512_sub_ps(even.v, _mm512_castsi512_ps(e));
        const __m512 lo = _mm512_sub_ps(odd.v, _mm512_castsi512_ps(o));
        const __m512i re = _mm512_add_epi32(_mm512_castps_si512(le), half);
        const __m512i ro = _mm512_add_epi32(_mm512_castps_si512(lo), half);
        _mm512_store_si512(low,
                           _mm512_or_si512(_mm512_srli_epi32(re, 16), _mm512_and_si512(ro, upper)));
    }

    // product[group][d][row] = sum over positions of value * probability, for row group g and (Two)
    // the next one.
    template <bool Two>
    void weigh(int64_t g, const Buffers& b) const {
        make_visible(b.high);
        for (int64_t v = 0; v < value_groups; v += 2) {
            const bool more = v + 1 < value_groups;
            const bf16* values = b.values + v * 1024;
            _tile_zero(0);
            _tile_zero(2);
            if (Two) _tile_zero(1);
            if (Two) _tile_zero(3);
            for (int64_t half = 0; half < 2; ++half) {
                const __m512i* high = b.high + g * kTile / 2 + half * 16;
                const __m512i* low = b.low + g * kTile / 2 + half * 16;
                _tile_loadd(4, values + half * 512, 64);
                _tile_loadd(6, high, 64);
                _tile_dpbf16ps(0, 4, 6);
                if (more) _tile_loadd(5, values + 1024 + half * 512, 64);
                if (more) _tile_dpbf16ps(2, 5, 6);
                if (Two) _tile_loadd(7, high + kTile / 2, 64);
                if (Two) _tile_dpbf16ps(1, 4, 7);
                if (Two && more) _tile_dpbf16ps(3, 5, 7);
                _tile_loadd(6, low, 64);
                _tile_dpbf16ps(0, 4, 6);
                if (more) _tile_dpbf16ps(2, 5, 6);
                if (Two) _tile_loadd(7, low + kTile / 2, 64);
                if (Two) _tile_dpbf16ps(1, 4, 7);
                if (Two && more) _tile_dpbf16ps(3, 5, 7);
            }
            float* to = b.product + v * kLanes * kLanes;
            _tile_stored(0, to, 64);
            if (more) _tile_stored(2, to + kLanes * kLanes, 64);
            if (Two) _tile_stored(1, to + group_floats(), 64);
            if (Two && more) _tile_stored(3, to + group_floats() + kLanes * kLanes, 64);
        }
    }

    // Adds a product to the sums of the rows of group g that see the tile.
    void gather(int64_t start, int64_t g, bool fresh, F keep, const float* product,
                const Buffers& b) const {
        const __m512i seen = visible(start, g, b);
        const __mmask16 rows = _mm512_test_epi32_mask(seen, seen);
        float* acc = b.part.acc + g * group_floats();
        for (int64_t i = 0; i < group_floats(); i += kLanes) {
            const F more = load(product + i);
            const F sum = fresh ? more : fma(load(acc + i), keep, more);
            _mm512_mask_storeu_ps(acc + i, rows, sum.v);
        }
    }

    F soften_group(int64_t start, int64_t n, bool fresh, int64_t g, const Buffers& b) const {
        const __m512i all = _mm512_set1_epi32(static_cast<int>(n));
        const bool masked = _mm512_cmplt_epi32_mask(visible(start, g, b), all) != 0;
        return masked ? soften<true>(start, n, fresh, g, b) : soften<false>(start, n, fresh, g, b);
    }

    void take_tile(const QueryBlock& block, int64_t start, bool fresh, const Buffers& b) const {
        const int64_t n = smaller(kTile, block.last_position + 1 - start);
        const int64_t g0 = first_row(block, start) / kLanes, g1 = blocks(block.rows, kLanes);
        score(block, start, n, g0, g1, b);
        load_values(block, start, n, b);
        for (int64_t g = g0; g < g1; g += 2) {
            const F keep = soften_group(start, n, fresh, g, b);
            if (g + 1 < g1) {
                const F keep1 = soften_group(start, n, fresh, g + 1, b);
                weigh<true>(g, b);
                gather(start, g + 1, fresh, keep1, b.product + group_floats(), b);
            } else {
                weigh<false>(g, b);
            }
            gather(start, g, fresh, keep, b.product, b);
        }
    }

    int64_t take_super(const QueryBlock& block, int64_t super, const Buffers& b) const {
        const int64_t stop = smaller(block.last_position + 1, (super + 1) * kSuper);
        configure_tiles(kLanes, kLanes, kLanes, kLanes);
        for (int64_t start = super * kSuper; start < stop; start += kTile)
            take_tile(block, start, start == super * kSuper, b);
        _tile_release();
        return first_row(block, super * kSuper);
    }

    // whole <- whole merged with the next super-tile's state, for rows from `from` on.
    void merge(const RowState& part, int64_t from, int64_t rows, bool start,
               const RowState& whole) const {
        for (int64_t g = from / kLanes; g < blocks(rows, kLanes); ++g) {
            const int64_t r = g * kLanes;
            const __mmask16 some =
                static_cast<__mmask16>(from > r ? 0xffffu << (from - r) : 0xffffu);
            const F before = load(whole.highest + r), here = load(part.highest + r);
            const F highest = start ? here : max(before, here);
            const F keep = exp(before - highest), take = exp(here - highest);
            const F sum = start ? load(part.sum + r)
                                : fma(load(part.sum + r), take, load(whole.sum + r) * keep);
            _mm512_mask_storeu_ps(whole.highest + r, some, highest.v);
            _mm512_mask_storeu_ps(whole.sum + r, some, sum.v);
            const float* theirs = part.acc + g * group_floats();
            float* mine = whole.acc + g * group_floats();
            for (int64_t i = 0; i < group_floats(); i += kLanes) {
                const F more = load(theirs + i);
                const F both = start ? more : fma(more, take, load(mine + i) * keep);
                _mm512_mask_storeu_ps(mine + i, some, both.v);
            }
        }
    }

    void write(const QueryBlock& block, const RowState& s) const {
        for (int64_t r = 0; r < block.rows; r += kLanes) {
            const F sum = load(s.sum + r);
            const float* acc = s.acc + r / kLanes * group_floats();
            for (int64_t d = 0; d < dim; d += kLanes) {
                F in[16], out[16];
                for (int64_t i = 0; i < kLanes; ++i) in[i] = load(acc + (d + i) * kLanes) / sum;
                transpose(in, out);
                for (int64_t i = 0; i < smaller(kLanes, block.rows - r); ++i)
                    store_some(static_cast<bf16*>(a.out) + row_offset(block, r + i) + d, out[i],
                               smaller(kLanes, dim - d));
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
