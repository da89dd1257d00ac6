// The task map of a step's attention: who computes which super-tiles, never what.
//
// A unit is a block of queries of one sequence and kv head. Its keys are cut into super-tiles at
// fixed positions; a unit is one task, or, where threads would wait, several, each a range of its
// super-tiles. ops/attention_plan.py is the same function in Python.
#pragma once

#include "types.h"

namespace moestro {

constexpr int64_t kTile = 64;
constexpr int64_t kSuper = 512;
constexpr int64_t kQueryRows = 64;    // rows (token, head of the group) that share a tile's keys
constexpr int64_t kTasksPerPart = 8;  // a cut unit's tasks are this small a share of a part

// The plan is int32: this header, then its tasks.
struct PlanHeader {
    int32_t num_tasks;
    int32_t num_cut;     // units of several tasks
    int32_t num_slots;   // softmax states that they hand on
    int32_t state_rows;  // most rows of a cut unit
    int32_t num_seqs, num_kv_heads, group, num_tokens;
};

// Super-tiles [begin, end) of a unit. A cut unit has a number among the cut ones, else -1. Its
// first task leaves one state, of its super-tiles merged, in `slot`; each later super-tile s
// leaves its own in slot + 1 + s - first_end, where first_end is the first task's end.
struct PlanTask {
    int32_t seq, kv_head, block;
    int32_t begin, end;
    int32_t cut, slot, first_end;
};

// Tokens of a block of queries.
static inline int64_t tokens_per_block(int64_t group) {
    return group < kQueryRows ? kQueryRows / group : 1;
}

// int32 that a plan may take.
int64_t plan_capacity(const PlanArgs& args);

// Writes the plan to args.plan. kNoMemory when there is none to sort in.
Status make_plan(const PlanArgs& args);

}  // namespace moestro
