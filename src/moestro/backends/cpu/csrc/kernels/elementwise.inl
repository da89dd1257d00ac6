// Norms, activation, rotary embedding and the KV write. Every row is computed alone.

// 1 / sqrt(mean(x^2) + eps) from fp32 values.
inline float inverse_rms(float sum_of_squares, int64_t size, float eps) {
    return 1.0f / __builtin_sqrtf(sum_of_squares / static_cast<float>(size) + eps);
}

template <class T, class TW>
void rms_norm_row(const NormArgs& a, int64_t row) {
    const int64_t size = a.size;
    const T* x = static_cast<const T*>(a.x) + row * size;
    const TW* weight = static_cast<const TW*>(a.weight);
    T* out = static_cast<T*>(a.out) + row * size;
    if (a.residual != nullptr) {
        const T* residual = static_cast<const T*>(a.residual) + row * size;
        T* summed = static_cast<T*>(a.summed) + row * size;
        for_vectors(size, [&](int64_t i, int64_t n) {
            store_some(summed + i, load_some(x + i, n) + load_some(residual + i, n), n);
        });
        x = summed;  // the norm reads the rounded sum
    }
    F squares = zero();
    for_vectors(size, [&](int64_t i, int64_t n) {
        const F v = load_some(x + i, n);
        squares = fma(v, v, squares);
    });
    const F scale = set1(inverse_rms(hsum(squares), size, a.eps));
    for_vectors(size, [&](int64_t i, int64_t n) {
        store_some(out + i, load_some(x + i, n) * scale * load_some(weight + i, n), n);
    });
}

void rms_norm(const NormArgs& a) {
    with_dtype(a.dtype, [&](auto* x) {
        with_dtype(a.weight_dtype, [&](auto* w) {
            using T = pointee<decltype(x)>;
            using TW = pointee<decltype(w)>;
            for_rows(a.rows, a.size, [&](int64_t row) { rms_norm_row<T, TW>(a, row); });
        });
    });
}

template <class T>
void silu_and_mul_row(const T* x, T* out, int64_t size) {
    for_vectors(size, [&](int64_t i, int64_t n) {
        store_some(out + i, silu(load_some(x + i, n)) * load_some(x + size + i, n), n);
    });
}

void silu_and_mul(const ActivationArgs& a) {
    with_dtype(a.dtype, [&](auto* type) {
        using T = pointee<decltype(type)>;
        for_rows(a.rows, 4 * a.size, [&](int64_t row) {
            silu_and_mul_row(static_cast<const T*>(a.x) + row * 2 * a.size,
                             static_cast<T*>(a.out) + row * a.size, a.size);
        });
    });
}

// One head of q or k: norm, then rotation of the pairs (i, i + dim / 2).
template <class T, class TW>
void norm_rope_head(const T* x, const TW* weight, const float* cos_sin, T* out, int64_t dim,
                    float eps) {
    const int64_t half = dim / 2;
    F squares = zero();
    for_vectors(dim, [&](int64_t i, int64_t n) {
        const F v = load_some(x + i, n);
        squares = fma(v, v, squares);
    });
    const F scale = set1(inverse_rms(hsum(squares), dim, eps));
    for_vectors(half, [&](int64_t i, int64_t n) {
        const F low = load_some(x + i, n) * scale * load_some(weight + i, n);
        const F high = load_some(x + half + i, n) * scale * load_some(weight + half + i, n);
        const F cos = load_some(cos_sin + i, n), sin = load_some(cos_sin + half + i, n);
        store_some(out + i, low * cos - high * sin, n);
        store_some(out + half + i, high * cos + low * sin, n);
    });
}

template <class T, class TW>
void qk_norm_rope_token(const RopeArgs& a, int64_t token) {
    const int64_t dim = a.head_dim, heads = a.num_heads, kv = a.num_kv_heads;
    const T* x = static_cast<const T*>(a.qkv) + token * (heads + 2 * kv) * dim;
    const float* cos_sin = a.cos_sin + token * dim;
    T* q = static_cast<T*>(a.q) + token * heads * dim;
    T* k = static_cast<T*>(a.k) + token * kv * dim;
    const TW* q_weight = static_cast<const TW*>(a.q_weight);
    const TW* k_weight = static_cast<const TW*>(a.k_weight);
    for (int64_t h = 0; h < heads; ++h, x += dim)
        norm_rope_head(x, q_weight, cos_sin, q + h * dim, dim, a.eps);
    for (int64_t h = 0; h < kv; ++h, x += dim)
        norm_rope_head(x, k_weight, cos_sin, k + h * dim, dim, a.eps);
    __builtin_memcpy(static_cast<T*>(a.v) + token * kv * dim, x,
                     static_cast<size_t>(kv * dim) * sizeof(T));
}

void qk_norm_rope(const RopeArgs& a) {
    const int64_t elements = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim;
    with_dtype(a.dtype, [&](auto* x) {
        with_dtype(a.weight_dtype, [&](auto* w) {
            using T = pointee<decltype(x)>;
            using TW = pointee<decltype(w)>;
            for_rows(a.num_tokens, elements,
                     [&](int64_t token) { qk_norm_rope_token<T, TW>(a, token); });
        });
    });
}

template <class T, class TP>
void store_kv_token(const StoreKvArgs& a, int64_t token) {
    const int64_t slot = a.slots[token];
    if (slot < 0) return;
    const int64_t page = slot / a.page_size, offset = slot % a.page_size;
    for (int64_t g = 0; g < a.num_kv_heads; ++g) {
        const T* k = static_cast<const T*>(a.k) + token * a.k_token_stride + g * a.k_head_stride;
        const T* v = static_cast<const T*>(a.v) + token * a.v_token_stride + g * a.v_head_stride;
        TP* k_out = static_cast<TP*>(a.k_pages) + page * a.k_page_stride +
                    g * a.k_page_head_stride + offset * a.k_slot_stride;
        TP* v_out = static_cast<TP*>(a.v_pages) + page * a.v_page_stride +
                    g * a.v_page_head_stride + offset * a.v_slot_stride;
        for_vectors(a.head_dim, [&](int64_t i, int64_t n) {
            store_some(k_out + i, load_some(k + i, n), n);
            store_some(v_out + i, load_some(v + i, n), n);
        });
    }
}

void store_kv(const StoreKvArgs& a) {
    with_dtype(a.dtype, [&](auto* x) {
        with_dtype(a.page_dtype, [&](auto* p) {
            using T = pointee<decltype(x)>;
            using TP = pointee<decltype(p)>;
            for_rows(a.num_tokens, 2 * a.num_kv_heads * a.head_dim,
                     [&](int64_t token) { store_kv_token<T, TP>(a, token); });
        });
    });
}
