// The driver of linear: a task is a panel times a block of rows.

constexpr int64_t kRowBlock = 192;  // rows of x a task takes at most

// Rows a block takes so that blocks are equal but for whole tiles.
inline int64_t even_rows(int64_t rows) {
    const int64_t each = blocks(rows, blocks(rows, kRowBlock));
    return smaller(blocks(each, kMaxTileRows) * kMaxTileRows, kRowBlock);
}

struct Linear {
    const LinearArgs& a;
    const Weight& weight;
    RowsOfX x;

    void run(int64_t t0, int64_t n, int64_t p) const {
        const void* rows[kRowBlock];
        for (int64_t i = 0; i < n; ++i) rows[i] = x.row(t0 + i);
        alignas(64) float c[kRowBlock * kOutStride];
        weight.times(0, p, rows, n, c);
        const PackedLayout& l = weight.layout;
        with_dtype(a.out_dtype, [&](auto* type) {
            using TO = pointee<decltype(type)>;
            TO* out = static_cast<TO*>(a.out) + t0 * l.rows;
            for (int64_t v = 0; v < l.width(p); ++v) {
                const int64_t first = l.first_row(p, v), count = l.rows_of(p, v);
                for (int64_t i = 0; i < n; ++i)
                    store_first(out + i * l.rows + first, c + i * kOutStride + v * kVectorRows,
                                count);
            }
        });
    }
};

Status linear(const LinearArgs& a) {
    const Weight weight(a.weight, a.x_dtype);
    char* room = nullptr;
    if (!weight.form.takes(a.x_dtype, false)) {
        room = static_cast<char*>(
            call_scratch(static_cast<size_t>(a.num_tokens * weight.form.bytes())));
        if (room == nullptr) return kNoMemory;
    }
    const Linear product{a, weight, prepare_rows(weight.form, a.x_dtype, a.x, a.num_tokens, room)};
    const int64_t rows = even_rows(a.num_tokens), panels = weight.layout.panels;
    // Panels in the order in which they lie, for the pool hands out neighbours.
    parallel(panels * blocks(a.num_tokens, rows), [&](int64_t task, int) {
        const int64_t t0 = task / panels * rows;
        product.run(t0, smaller(rows, a.num_tokens - t0), task % panels);
    });
    return kOk;
}
