// Choosing experts.

inline float key_of(float score) { return score == score ? score : __builtin_inff(); }

// Scores of one token into scores[E]; softmax or sigmoid, lane by lane.
inline void expert_scores(const float* logits, int64_t experts, bool softmax, float* scores) {
    if (!softmax) {
        for_vectors(experts, [&](int64_t i, int64_t n) {
            store_some(scores + i, sigmoid(load_some(logits + i, n)), n);
        });
        return;
    }
    float highest = logits[0];
    for (int64_t i = 1; i < experts; ++i) highest = logits[i] > highest ? logits[i] : highest;
    F total = zero();
    for_vectors(experts, [&](int64_t i, int64_t n) {
        const F e = exp(load_some(logits + i, n) - set1(highest));
        store_some(scores + i, e, n);
        total = total + keep_n(e, n, 0.0f);
    });
    const F sum = set1(hsum(total));
    for_vectors(experts, [&](int64_t i, int64_t n) {
        store_some(scores + i, load_some(scores + i, n) / sum, n);
    });
}

// Falling keys, ties to the lowest index, NaN first: always top_k different experts.
inline void choose(const GatingArgs& a, const float* scores, int32_t* ids, float* keys) {
    int64_t chosen = 0;
    for (int64_t e = 0; e < a.num_experts; ++e) {
        const float key = key_of(a.bias == nullptr ? scores[e] : scores[e] + a.bias[e]);
        if (chosen == a.top_k && !(key > keys[chosen - 1])) continue;
        int64_t at = chosen < a.top_k ? chosen++ : chosen - 1;
        for (; at > 0 && key > keys[at - 1]; --at) {
            keys[at] = keys[at - 1];
            ids[at] = ids[at - 1];
        }
        keys[at] = key;
        ids[at] = static_cast<int32_t>(e);
    }
}

void moe_gating_top_k(const GatingArgs& a) {
    constexpr int64_t kMaxExperts = 4096;  // the caller refuses more
    for_rows(a.num_tokens, 16 * a.num_experts, [&](int64_t token) {
        float scores[kMaxExperts], keys[kMaxExperts];
        int32_t* ids = a.topk_ids + token * a.top_k;
        float* weights = a.topk_weights + token * a.top_k;
        expert_scores(a.logits + token * a.num_experts, a.num_experts, a.softmax != 0, scores);
        choose(a, scores, ids, keys);
        float sum = 0.0f;
        for (int64_t k = 0; k < a.top_k; ++k) sum += scores[ids[k]];
        for (int64_t k = 0; k < a.top_k; ++k) {
            const float score = scores[ids[k]];
            weights[k] = (a.renormalize ? score / (sum + a.epsilon) : score) * a.scaling;
        }
    });
}
