// Activations as the micro-kernels read them: bf16 where the level multiplies that, fp32, or int8.

enum class RowKind { kFloat32, kBFloat16, kInt8 };

struct RowForm {
    RowKind kind = RowKind::kFloat32;
    int64_t size = 0;    // elements of a row
    int64_t line_k = 1;  // elements are read in such steps: past `size` there are zeros
    int64_t groups = 0, group_size = 0;
    int32_t code_of_zero = 0;  // what a group's sum of x is multiplied with, negated

    // Any weight's step divides it.
    static int64_t padded(int64_t size) { return blocks(size, 64) * 64; }

    int64_t bytes() const {
        switch (kind) {
            case RowKind::kFloat32:
                return padded(size) * 4;
            case RowKind::kBFloat16:
                return padded(size) * 2;
            default:
                return lines(padded(size) + (groups + 1) * 4);
        }
    }
    bool same_as(const RowForm& o) const {
        return kind == o.kind && size == o.size && groups == o.groups &&
               group_size == o.group_size && code_of_zero == o.code_of_zero;
    }
    // Whether rows of this dtype can be read where they lie, given zeros up to padded(size) or not.
    bool takes(int32_t dtype, bool has_zeros_behind) const {
        const bool same = (kind == RowKind::kFloat32 && dtype == kF32) ||
                          (kind == RowKind::kBFloat16 && dtype == kBF16);
        return same && (has_zeros_behind || size % line_k == 0);
    }
};

inline RowForm row_form(const PackedLayout& l, int32_t x_dtype) {
    RowForm form;
    form.size = l.in_features;
    form.line_k = l.line_k;
    if (l.format == kW8A8 || l.format == kW4A8) {
        form.kind = RowKind::kInt8;
        form.groups = l.groups();
        form.group_size = l.format == kW8A8 ? l.in_features : l.group_size;
        form.code_of_zero = l.format == kW8A8 ? 128 : l.has_zeros ? 1 : 8;
    } else if (kDotsBf16 && x_dtype == kBF16 && (l.format == kBF16 || l.format == kFP8)) {
        form.kind = RowKind::kBFloat16;
    }
    return form;
}

// The largest magnitude in a row; NaN where a number in it is not finite.
template <class T>
inline float magnitude(const T* x, int64_t size) {
    F largest = zero(), spoilt = zero();
    for_vectors(size, [&](int64_t i, int64_t n) {
        const F v = load_some(x + i, n);
        largest = max(max(v, neg(v)), largest);
        spoilt = fma(v, zero(), spoilt);
    });
    return hmax(largest) + hsum(spoilt);
}

// Int8 codes, then each group's start, then the scale (quant/int_group.py).
template <class T>
void quantize_row(const RowForm& form, const T* x, void* row) {
    int8_t* codes = static_cast<int8_t*>(row);
    int32_t* starts = reinterpret_cast<int32_t*>(codes + form.padded(form.size));
    float* scale = reinterpret_cast<float*>(starts + form.groups);
    const float amax = magnitude(x, form.size), inverse = 127.0f / amax;
    const bool usable = inverse <= 3.4028234e38f;  // false for NaN
    __builtin_memset(codes, 0, static_cast<size_t>(form.padded(form.size)));
    *scale = usable ? amax / 127.0f : amax != amax ? amax : 0.0f;
    if (!usable) {
        for (int64_t g = 0; g < form.groups; ++g) starts[g] = 0;
        return;
    }
    for_vectors(form.size, [&](int64_t i, int64_t n) {
        const F scaled = round_even(load_some(x + i, n) * set1(inverse));
        store_codes(codes + i, min(set1(127.0f), max(set1(-127.0f), scaled)));
    });
    for (int64_t g = 0; g < form.groups; ++g) {
        const int8_t* group = codes + g * form.group_size;
        int32_t sum = 0;
        for (int64_t i = 0; i < form.group_size; ++i) sum += group[i];
        starts[g] = -sum * form.code_of_zero;
    }
}

template <class T>
void widen_row(const RowForm& form, const T* x, float* row) {
    for_vectors(form.size,
                [&](int64_t i, int64_t n) { store_some(row + i, load_some(x + i, n), n); });
    for (int64_t i = form.size; i < form.padded(form.size); ++i) row[i] = 0.0f;
}

inline void prepare_row(const RowForm& form, int32_t dtype, const void* x, void* row) {
    if (form.kind == RowKind::kBFloat16) {
        const size_t bytes = static_cast<size_t>(form.size) * 2;
        __builtin_memcpy(row, x, bytes);
        __builtin_memset(static_cast<char*>(row) + bytes, 0,
                         static_cast<size_t>(form.bytes()) - bytes);
        return;
    }
    with_dtype(dtype, [&](auto* type) {
        using T = pointee<decltype(type)>;
        if (form.kind == RowKind::kInt8)
            quantize_row(form, static_cast<const T*>(x), row);
        else
            widen_row(form, static_cast<const T*>(x), static_cast<float*>(row));
    });
}

constexpr int64_t kSerialElements = 16384;  // fewer are prepared on the caller: waking costs more

// Rows of activations in some form, one every `stride` bytes.
struct RowsOfX {
    const char* data;
    int64_t stride;
    const void* row(int64_t i) const { return data + i * stride; }
};

// n rows of x in a form: where they lie, or prepared in `room`.
inline RowsOfX prepare_rows(const RowForm& form, int32_t dtype, const void* x, int64_t n,
                            char* room) {
    const char* from = static_cast<const char*>(x);
    const int64_t x_stride = form.size * (dtype == kF32 ? 4 : 2);
    if (form.takes(dtype, false)) return {from, x_stride};
    const int64_t stride = form.bytes();
    const auto one = [&](int64_t i) {
        prepare_row(form, dtype, from + i * x_stride, room + i * stride);
    };
    if (n * form.size <= kSerialElements)
        for (int64_t i = 0; i < n; ++i) one(i);
    else
        for_rows(n, form.size, one);
    return {room, stride};
}

// A weight, what multiplies with it, and the rows it wants.
struct Weight {
    PackedLayout layout;
    const uint8_t* data;
    int64_t matrix_bytes;
    RowForm form;
    Multiply multiply;

    Weight(const PackedWeight& w, int32_t x_dtype)
        : layout(w),
          data(static_cast<const uint8_t*>(w.data)),
          matrix_bytes(layout.matrix_bytes()),
          form(row_form(layout, x_dtype)),
          multiply(product(layout, form)) {}

    static Multiply product(const PackedLayout& l, const RowForm& form) {
#if defined(MOESTRO_LEVEL_AMX)
        const Multiply on_tiles = tile_product(l, form.kind == RowKind::kBFloat16);
        if (on_tiles != nullptr) return on_tiles;
#endif
        switch (l.format) {
            case kF32:
                return multiply_float<Float32>;
            case kF16:
                return multiply_float<Float16>;
            case kW8A8:
                return multiply_int8;
            case kW4A8:
                return nibble_product(l);
            default:
                break;
        }
#if defined(MOESTRO_LEVEL_AVX512)
        if (form.kind == RowKind::kBFloat16)
            return l.format == kBF16 ? multiply_float<BFloat16Dots> : multiply_float<Fp8Dots>;
#endif
        (void)form;
        return l.format == kBF16 ? multiply_float<BFloat16> : multiply_float<Fp8>;
    }

    const uint8_t* panel(int64_t expert, int64_t p) const {
        return data + expert * matrix_bytes + layout.panel_at(p);
    }
    // out[n][kOutStride] = rows . panel^T
    void times(int64_t expert, int64_t p, const void* const* rows, int64_t n, float* out) const {
        multiply(layout, panel(expert, p), layout.width(p), rows, n, out);
    }
};
