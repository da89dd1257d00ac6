// A captured step: the calls that it made, as op codes and copies of their argument structs. Replay
// makes them again, in order, in one call from Python.
#include <chrono>
#include <cstring>
#include <new>
#include <vector>

#include "api.h"
#include "thread_pool.h"

namespace moestro {
namespace {

struct Command {
    int32_t op;
    size_t at;  // where its struct lies in `args`
};

// Valid as long as the memory that the structs point to, and at the level and number of threads it
// was captured with: packed layouts and plans may depend on both.
struct Graph {
    std::vector<Command> commands;
    std::vector<int64_t> args;  // words, so that every struct is aligned
    const Kernels* level = &kernels();
    int threads = num_workers();
};

// Calls done(index) after each call.
template <class Done>
Status replay(const Graph& g, Done&& done) {
    int64_t index = 0;
    for (const Command& command : g.commands) {
        const Op& op = *find_op(command.op);
        const Status status = op.launch(g.args.data() + command.at);
        if (status != kOk) return fail_in(status, index, op.name);
        done(index++);
    }
    return kOk;
}

}  // namespace
}  // namespace moestro

using namespace moestro;

// Null when memory is out.
MOESTRO_API void* moestro_graph_new() { return new (std::nothrow) Graph; }

MOESTRO_API void moestro_graph_free(void* graph) { delete static_cast<Graph*>(graph); }

MOESTRO_API int32_t moestro_graph_append(void* graph, int32_t op, const void* args) {
    Graph& g = *static_cast<Graph*>(graph);
    const Op* found = find_op(op);
    if (found == nullptr) return fail(kBadShape, "no op has code %d", op);
    const size_t words = (static_cast<size_t>(found->args_size) + 7) / 8, at = g.args.size();
    try {
        g.args.resize(at + words);
        g.commands.push_back({op, at});
    } catch (const std::bad_alloc&) {
        return fail(kNoMemory, "no memory for a graph of %lld calls", (ll)g.commands.size());
    }
    std::memcpy(g.args.data() + at, args, static_cast<size_t>(found->args_size));
    return kOk;
}

MOESTRO_API int64_t moestro_graph_size(const void* graph) {
    return static_cast<int64_t>(static_cast<const Graph*>(graph)->commands.size());
}

// 1 when level and threads are still those of the capture.
MOESTRO_API int32_t moestro_graph_current(const void* graph) {
    const Graph& g = *static_cast<const Graph*>(graph);
    return g.level == &kernels() && g.threads == num_workers();
}

// Stops at the first call that fails and names it.
MOESTRO_API int32_t moestro_graph_replay(const void* graph) {
    return replay(*static_cast<const Graph*>(graph), [](int64_t) {});
}

// A replay that writes the seconds of each call.
MOESTRO_API int32_t moestro_graph_time(const void* graph, double* seconds) {
    using Clock = std::chrono::steady_clock;
    auto before = Clock::now();
    return replay(*static_cast<const Graph*>(graph), [&](int64_t index) {
        const auto now = Clock::now();
        seconds[index] = std::chrono::duration<double>(now - before).count();
        before = now;
    });
}

// The op code of a call, and where its arguments lie.
MOESTRO_API int32_t moestro_graph_call(const void* graph, int64_t index, const void** args) {
    const Graph& g = *static_cast<const Graph*>(graph);
    const Command& command = g.commands[static_cast<size_t>(index)];
    *args = g.args.data() + command.at;
    return command.op;
}
