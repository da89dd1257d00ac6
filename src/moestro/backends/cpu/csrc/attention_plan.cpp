#include "attention_plan.h"

#include <algorithm>
#include <new>
#include <vector>

namespace moestro {
namespace {

// A block of queries of a sequence: every kv head has the same.
struct Unit {
    int64_t seq, block, rows, supers, cost, super_cost;
};

struct Planner {
    const PlanArgs& a;
    int64_t group, tokens;

    explicit Planner(const PlanArgs& args)
        : a(args),
          group(args.num_heads / args.num_kv_heads),
          tokens(tokens_per_block(args.num_heads / args.num_kv_heads)) {}

    // Bytes of keys and values read, and arithmetic in the bytes that could be read meanwhile.
    int64_t position_cost(int64_t rows) const { return 2 * a.kv_row_bytes + rows * a.head_dim; }

    void find_units(std::vector<Unit>& units) const {
        for (int64_t s = 0; s < a.num_seqs; ++s) {
            const int64_t n = a.query_start_loc[s + 1] - a.query_start_loc[s];
            for (int64_t skip = 0; skip < n; skip += tokens) {
                const int64_t mine = std::min(tokens, n - skip);
                const int64_t length = a.seq_lens[s] - n + skip + mine;  // positions it reads
                const int64_t each = position_cost(mine * group);
                units.push_back({s, skip / tokens, mine * group, (length + kSuper - 1) / kSuper,
                                 length * each, kSuper * each});
            }
        }
    }

    // The largest load when every task goes to the part with the least so far, largest first.
    int64_t largest_load(const std::vector<Unit>& falling) const {
        std::vector<int64_t> loads(static_cast<size_t>(a.num_parts), 0);
        for (const Unit& unit : falling)
            for (int64_t g = 0; g < a.num_kv_heads; ++g)
                *std::min_element(loads.begin(), loads.end()) += unit.cost;
        return *std::max_element(loads.begin(), loads.end());
    }

    // Cost above which a unit is cut, or -1 to cut none.
    int64_t limit(const std::vector<Unit>& falling) const {
        if (a.num_parts < 2 || falling.empty()) return -1;
        int64_t total = 0;
        for (const Unit& unit : falling) total += unit.cost * a.num_kv_heads;
        const int64_t most = total / (a.num_parts * kTasksPerPart);
        if (falling[0].cost <= most) return -1;
        const int64_t mean = total / a.num_parts;
        return largest_load(falling) <= mean + mean / 16 ? -1 : most;
    }
};

struct Sized {
    int64_t cost;
    PlanTask task;
};

}  // namespace

int64_t plan_capacity(const PlanArgs& a) {
    const int64_t tokens = tokens_per_block(a.num_heads / a.num_kv_heads);
    const int64_t units = a.num_kv_heads * (a.num_seqs + a.num_tokens / tokens);
    return 8 * (1 + units + 4 * kTasksPerPart * a.num_parts);
}

Status make_plan(const PlanArgs& a) try {
    const Planner planner(a);
    std::vector<Unit> units;
    planner.find_units(units);
    std::vector<Unit> falling = units;
    std::stable_sort(falling.begin(), falling.end(),
                     [](const Unit& x, const Unit& y) { return x.cost > y.cost; });
    const int64_t most = planner.limit(falling);
    PlanHeader header = {};
    header.num_seqs = static_cast<int32_t>(a.num_seqs);
    header.num_kv_heads = static_cast<int32_t>(a.num_kv_heads);
    header.group = static_cast<int32_t>(planner.group);
    header.num_tokens = static_cast<int32_t>(a.num_tokens);
    std::vector<Sized> tasks;
    for (const Unit& unit : units)
        for (int64_t g = 0; g < a.num_kv_heads; ++g) {
            const bool cut = most >= 0 && unit.cost > most && unit.supers > 1;
            const int64_t step = cut ? std::max<int64_t>(1, most / unit.super_cost) : unit.supers;
            PlanTask task = {};
            task.seq = static_cast<int32_t>(unit.seq);
            task.kv_head = static_cast<int32_t>(g);
            task.block = static_cast<int32_t>(unit.block);
            task.first_end = static_cast<int32_t>(step);
            task.cut = cut && step < unit.supers ? header.num_cut : -1;
            task.slot = task.cut < 0 ? -1 : header.num_slots;
            if (task.cut >= 0) {
                ++header.num_cut;
                header.num_slots += static_cast<int32_t>(1 + unit.supers - step);
                header.state_rows = std::max(header.state_rows, static_cast<int32_t>(unit.rows));
            }
            for (int64_t begin = 0; begin < unit.supers; begin += step) {
                const int64_t end = std::min(begin + step, unit.supers);
                task.begin = static_cast<int32_t>(begin);
                task.end = static_cast<int32_t>(end);
                const int64_t after = (unit.supers - end) * unit.super_cost;
                const int64_t rest = unit.cost - begin * unit.super_cost;
                tasks.push_back({after > 0 ? (end - begin) * unit.super_cost : rest, task});
            }
        }
    std::stable_sort(tasks.begin(), tasks.end(),
                     [](const Sized& x, const Sized& y) { return x.cost > y.cost; });
    header.num_tasks = static_cast<int32_t>(tasks.size());
    std::fill(a.plan, a.plan + a.capacity, 0);
    *reinterpret_cast<PlanHeader*>(a.plan) = header;
    auto* out = reinterpret_cast<PlanTask*>(a.plan + 8);
    for (const Sized& sized : tasks) *out++ = sized.task;
    return kOk;
} catch (const std::bad_alloc&) {
    return kNoMemory;
}

}  // namespace moestro
