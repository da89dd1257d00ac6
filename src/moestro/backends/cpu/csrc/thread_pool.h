// The kernels' own threads: static, few, asleep when idle, made anew after fork.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace moestro {

using Task = void (*)(void* context, int64_t index, int worker);

// Runs task(context, i, worker) for every i in [0, count), on the caller and the pool's workers.
// worker is in [0, num_workers()). Each of them begins with an even share of neighbouring indices,
// in order; who is done early takes over half of what another has left. So which worker runs which
// index is not fixed: no result may depend on it. Runs on the caller alone when another thread is
// using the pool. At most max_workers take part (0: all), for callers that made as many buffers.
void parallel_for(int64_t count, Task task, void* context, int max_workers = 0);

// Most threads that take part in parallel_for, the caller included; at least 1. No more run than
// there are processors to run on, since a thread without one only holds the others up; tests of
// many threads on few processors oversubscribe.
int num_workers();
void set_num_workers(int count, bool oversubscribe = false);

// A buffer of the calling thread, kept between calls and grown on demand. Null when memory is
// out. Its contents are lost at the next call of the same thread.
void* call_scratch(size_t bytes);
void release_scratch();

template <class Fn>
inline void parallel(int64_t count, Fn&& fn, int max_workers = 0) {
    using F = std::remove_reference_t<Fn>;
    parallel_for(
        count,
        [](void* context, int64_t index, int worker) {
            (*static_cast<F*>(context))(index, worker);
        },
        const_cast<void*>(static_cast<const void*>(&fn)), max_workers);
}

}  // namespace moestro
