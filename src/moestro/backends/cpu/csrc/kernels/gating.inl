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

// What the choice needs; the same for every token.
struct GatingRule {
    const float* bias;  // or null
    int64_t num_experts, top_k;
    float epsilon, scaling;
    bool softmax, renormalize;
};

template <class Args>
inline GatingRule rule_of(const Args& a) {
    return {a.bias,    a.num_experts,  a.top_k,           a.epsilon,
            a.scaling, a.softmax != 0, a.renormalize != 0};
}

// Falling keys, ties to the lowest index, NaN first: always top_k different experts.
inline void choose(const GatingRule& rule, const float* scores, int32_t* ids, float* keys) {
    int64_t chosen = 0;
    for (int64_t e = 0; e < rule.num_experts; ++e) {
        const float key = key_of(rule.bias == nullptr ? scores[e] : scores[e] + rule.bias[e]);
        if (chosen == rule.top_k && !(key > keys[chosen - 1])) continue;
        int64_t at = chosen < rule.top_k ? chosen++ : chosen - 1;
        for (; at > 0 && key > keys[at - 1]; --at) {
            keys[at] = keys[at - 1];
            ids[at] = ids[at - 1];
        }
        keys[at] = key;
        ids[at] = static_cast<int32_t>(e);
    }
}

// One token's experts and their weights.
inline void gate_token(const GatingRule& rule, const float* logits, int32_t* ids, float* weights) {
    float scores[kMaxExperts], keys[kMaxExperts];
    expert_scores(logits, rule.num_experts, rule.softmax, scores);
    choose(rule, scores, ids, keys);
    float sum = 0.0f;
    for (int64_t k = 0; k < rule.top_k; ++k) sum += scores[ids[k]];
    for (int64_t k = 0; k < rule.top_k; ++k) {
        const float score = scores[ids[k]];
        weights[k] = (rule.renormalize ? score / (sum + rule.epsilon) : score) * rule.scaling;
    }
}

void moe_gating_top_k(const GatingArgs& a) {
    const GatingRule rule = rule_of(a);
    for_rows(a.num_tokens, 16 * a.num_experts, [&](int64_t token) {
        gate_token(rule, a.logits + token * a.num_experts, a.topk_ids + token * a.top_k,
                   a.topk_weights + token * a.top_k);
    });
}
