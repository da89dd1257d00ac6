// Cutting work into blocks, and handing out rows that are computed alone.

inline int64_t blocks(int64_t size, int64_t block) { return (size + block - 1) / block; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
// Bytes rounded up to whole cache lines.
inline int64_t lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Rows a task takes: enough elements to be worth handing out.
inline int64_t rows_per_task(int64_t row_elements) {
    const int64_t rows = 8192 / (row_elements < 1 ? 1 : row_elements);
    return rows < 1 ? 1 : rows;
}

template <class Row>
void for_rows(int64_t rows, int64_t row_elements, Row&& row) {
    const int64_t step = rows_per_task(row_elements);
    parallel((rows + step - 1) / step, [&](int64_t task, int) {
        const int64_t end = (task + 1) * step < rows ? (task + 1) * step : rows;
        for (int64_t i = task * step; i < end; ++i) row(i);
    });
}
