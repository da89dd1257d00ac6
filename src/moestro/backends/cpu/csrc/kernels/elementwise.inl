// Norms, activation, rotary embedding and the KV write. Every row is computed alone.

// 1 / sqrt(mean(x^2) + eps) from fp32 values.
inline float inverse_rms(float sum_of_squares, int64_t size, float eps) {
    return 1.0f / __builtin_sqrtf(sum_of_squares / static_cast<float>(size) + eps);
}

template <class T, class TW>
void norm_row(const T* x, const TW* weight, int64_t size, float eps, T* out) {
    F squares = zero();
    for_vectors(size, [&](int64_t i, int64_t n) {
        const F v = load_some(x + i, n);
        squares = fma(v, v, squares);
    });
    const F scale = set1(inverse_rms(hsum(squares), size, eps));
    for_vectors(size, [&](int64_t i, int64_t n) {
        store_some(out + i, load_some(x + i, n) * scale * load_some(weight + i, n), n);
    });
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
    norm_row(x, weight, size, a.eps, out);
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

template <class T, class TW>
void mtp_input_row(const MtpInputArgs& a, int64_t row) {
    const int64_t size = a.size;
    T* out = static_cast<T*>(a.out) + row * 2 * size;
    if (a.positions[row] == 0)
        __builtin_memset(out, 0, static_cast<size_t>(size) * sizeof(T));
    else
        norm_row(static_cast<const T*>(a.embeddings) + row * size,
                 static_cast<const TW*>(a.embedding_weight), size, a.eps, out);
    norm_row(static_cast<const T*>(a.hidden_states) + row * size,
             static_cast<const TW*>(a.hidden_weight), size, a.eps, out + size);
}

void mtp_input(const MtpInputArgs& a) {
    with_dtype(a.dtype, [&](auto* x) {
        with_dtype(a.weight_dtype, [&](auto* w) {
            using T = pointee<decltype(x)>;
            using TW = pointee<decltype(w)>;
            for_rows(a.rows, 2 * a.size, [&](int64_t row) { mtp_input_row<T, TW>(a, row); });
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

// What a head's rotation needs beside its numbers: rotary of dim elements are rotated.
struct RopeShape {
    int64_t dim, rotary;
    float eps;
};

// One head of q or k: norm, then rotation of the pairs (i, i + rotary / 2).
template <class T, class TW>
__attribute__((noinline)) void norm_rope_head(const RopeShape& shape, const T* x, const TW* weight,
                                              const float* cos_sin, T* out) {
    const int64_t half = shape.rotary / 2;
    F squares = zero();
    for_vectors(shape.dim, [&](int64_t i, int64_t n) {
        const F v = load_some(x + i, n);
        squares = fma(v, v, squares);
    });
    const F scale = set1(inverse_rms(hsum(squares), shape.dim, shape.eps));
    for_vectors(half, [&](int64_t i, int64_t n) {
        const F low = load_some(x + i, n) * scale * load_some(weight + i, n);
        const F high = load_some(x + half + i, n) * scale * load_some(weight + half + i, n);
        const F cos = load_some(cos_sin + i, n), sin = load_some(cos_sin + half + i, n);
        store_some(out + i, low * cos - high * sin, n);
        store_some(out + half + i, high * cos + low * sin, n);
    });
    for_vectors(shape.dim - shape.rotary, [&](int64_t i, int64_t n) {
        i += shape.rotary;
        store_some(out + i, load_some(x + i, n) * scale * load_some(weight + i, n), n);
    });
}

template <class T, class TW>
void qk_norm_rope_token(const RopeArgs& a, int64_t token) {
    const int64_t dim = a.head_dim, heads = a.num_heads, kv = a.num_kv_heads;
    const RopeShape shape = {dim, a.rotary_dim, a.eps};
    const T* x = static_cast<const T*>(a.qkv) + token * (heads + 2 * kv) * dim;
    const float* cos_sin = a.cos_sin + token * a.rotary_dim;
    T* q = static_cast<T*>(a.q) + token * heads * dim;
    T* k = static_cast<T*>(a.k) + token * kv * dim;
    const TW* q_weight = static_cast<const TW*>(a.q_weight);
    const TW* k_weight = static_cast<const TW*>(a.k_weight);
    for (int64_t h = 0; h < heads; ++h, x += dim)
        norm_rope_head(shape, x, q_weight, cos_sin, q + h * dim);
    for (int64_t h = 0; h < kv; ++h, x += dim)
        norm_rope_head(shape, x, k_weight, cos_sin, k + h * dim);
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

// Where the key (or value) of head g of a slot lies.
template <class TP>
inline PageRow<TP> key_row(const KvPages& p, int64_t slot, int64_t g) {
    const int64_t page = slot / p.page_size, offset = slot % p.page_size;
    TP* at = static_cast<TP*>(p.k) + page * p.k_page_stride + g * p.k_head_stride +
             offset * p.k_slot_stride;
    if constexpr (!is_code<TP>) return {at, nullptr};
    return {at, p.k_scales + page * p.k_scale_page_stride + g * p.k_scale_head_stride + offset};
}
template <class TP>
inline PageRow<TP> value_row(const KvPages& p, int64_t slot, int64_t g) {
    const int64_t page = slot / p.page_size, offset = slot % p.page_size;
    TP* at = static_cast<TP*>(p.v) + page * p.v_page_stride + g * p.v_head_stride +
             offset * p.v_slot_stride;
    if constexpr (!is_code<TP>) return {at, nullptr};
    return {at, p.v_scales + page * p.v_scale_page_stride + g * p.v_scale_head_stride + offset};
}

template <class T, class TP>
void store_kv_token(const StoreKvArgs& a, int64_t token) {
    const int64_t slot = a.slots[token];
    if (slot < 0) return;
    for (int64_t g = 0; g < a.num_kv_heads; ++g) {
        const T* k = static_cast<const T*>(a.k) + token * a.k_token_stride + g * a.k_head_stride;
        const T* v = static_cast<const T*>(a.v) + token * a.v_token_stride + g * a.v_head_stride;
        store_row(k, a.head_dim, key_row<TP>(a.pages, slot, g));
        store_row(v, a.head_dim, value_row<TP>(a.pages, slot, g));
    }
}

void store_kv(const StoreKvArgs& a) {
    with_dtype(a.dtype, [&](auto* x) {
        with_page_dtype(a.pages.dtype, [&](auto* p) {
            using T = pointee<decltype(x)>;
            using TP = pointee<decltype(p)>;
            for_rows(a.num_tokens, 2 * a.num_kv_heads * a.head_dim,
                     [&](int64_t token) { store_kv_token<T, TP>(a, token); });
        });
    });
}

// A row times the orthogonal Hadamard matrix, in place: butterflies of distance 1, 2, 4, ... in
// fp32, rounded once.
template <class T>
__attribute__((noinline)) void hadamard_row(T* x, int64_t dim) {
    float y[kMaxHeadDim];
    for_vectors(dim, [&](int64_t i, int64_t n) { store_some(y + i, load_some(x + i, n), n); });
    for (int64_t d = 1; d < dim; d *= 2)
        for (int64_t start = 0; start < dim; start += 2 * d) {
            float *low = y + start, *high = low + d;
            for_vectors(d, [&](int64_t i, int64_t n) {
                const F a = load_some(low + i, n), b = load_some(high + i, n);
                store_some(low + i, a + b, n);
                store_some(high + i, a - b, n);
            });
        }
    const F scale = set1(static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(dim))));
    for_vectors(dim,
                [&](int64_t i, int64_t n) { store_some(x + i, load_some(y + i, n) * scale, n); });
}

template <class T, class TW, class TP>
void qk_norm_rope_store_token(const RopeStoreArgs& a, int64_t token) {
    const int64_t dim = a.head_dim, heads = a.num_heads, kv = a.num_kv_heads;
    const RopeShape shape = {dim, a.rotary_dim, a.eps};
    const T* x = static_cast<const T*>(a.qkv) + token * (heads + 2 * kv) * dim;
    const float* cos_sin = a.table + a.positions[token] * a.rotary_dim;
    T* q = static_cast<T*>(a.q) + token * heads * dim;
    for (int64_t h = 0; h < heads; ++h, x += dim, q += dim) {
        norm_rope_head(shape, x, static_cast<const TW*>(a.q_weight), cos_sin, q);
        if (a.hadamard) hadamard_row(q, dim);
    }
    const int64_t slot = a.slots[token];
    if (slot < 0) return;
    for (int64_t g = 0; g < kv; ++g, x += dim) {
        T k[kMaxHeadDim];
        norm_rope_head(shape, x, static_cast<const TW*>(a.k_weight), cos_sin, k);
        if (a.hadamard) hadamard_row(k, dim);
        store_row(k, dim, key_row<TP>(a.pages, slot, g));
        store_row(x + kv * dim, dim, value_row<TP>(a.pages, slot, g));
    }
}

void qk_norm_rope_store(const RopeStoreArgs& a) {
    const int64_t elements = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim;
    with_dtype(a.dtype, [&](auto* x) {
        with_dtype(a.weight_dtype, [&](auto* w) {
            with_page_dtype(a.pages.dtype, [&](auto* p) {
                using T = pointee<decltype(x)>;
                using TW = pointee<decltype(w)>;
                using TP = pointee<decltype(p)>;
                for_rows(a.num_tokens, elements,
                         [&](int64_t token) { qk_norm_rope_store_token<T, TW, TP>(a, token); });
            });
        });
    });
}
