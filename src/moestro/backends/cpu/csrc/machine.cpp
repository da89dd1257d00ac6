// Measures the machine with the chosen level's instructions and the pool's threads, for `moestro
// bench machine` and whoever compares a kernel with what is possible.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "api.h"
#include "thread_pool.h"

namespace moestro {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// Whatever was computed ends here, so that it had to be computed.
volatile float g_sink;

// Seconds that `fn(worker's number)` takes on all threads at once.
template <class Fn>
double time_all(Fn&& fn) {
    const auto start = Clock::now();
    parallel(num_workers(), [&](int64_t i, int) { fn(i); });
    return seconds_since(start);
}

// A buffer too large for the caches, every page of it written by the thread that will read it.
class Buffer {
  public:
    explicit Buffer(int64_t bytes) : part_(bytes / num_workers() / kPage * kPage) {
        data_ = static_cast<char*>(std::aligned_alloc(kPage, static_cast<size_t>(this->bytes())));
        if (data_ == nullptr) return;
#if defined(__linux__)
        madvise(data_, static_cast<size_t>(this->bytes()), MADV_HUGEPAGE);
#endif
        time_all([this](int64_t i) { std::memset(part(i), 0, static_cast<size_t>(part_)); });
    }
    Buffer(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }

    bool there() const { return data_ != nullptr; }
    int64_t bytes() const { return part_ * num_workers(); }
    char* part(int64_t i) const { return data_ + i * part_; }
    int64_t part_floats() const { return part_ / 4; }

  private:
    static constexpr int64_t kPage = int64_t{2} << 20;
    int64_t part_;
    char* data_;
};

}  // namespace
}  // namespace moestro

using namespace moestro;

// out[0 .. runs): bytes read a second by all threads, each streaming through its own part of a
// buffer of about `bytes`.
MOESTRO_API int32_t moestro_read_rates(int64_t bytes, int32_t runs, double* out) {
    const auto read = kernels().machine.read;
    const Buffer buffer(bytes);
    if (!buffer.there() || buffer.bytes() == 0)
        return fail(kNoMemory, "no memory for a buffer of %lld bytes", (ll)bytes);
    for (int32_t run = 0; run < runs; ++run)
        out[run] =
            static_cast<double>(buffer.bytes()) / time_all([&](int64_t i) {
                g_sink = read(reinterpret_cast<const float*>(buffer.part(i)), buffer.part_floats());
            });
    return kOk;
}

// out[0 .. runs): operations a second (a multiply-add is two) of all threads on registers alone;
// each run lasts about `seconds`. kind: 0 fp32, 1 bf16 products summed in fp32, 2 int8 products
// summed in int32. kBadDtype where the level has no instruction for the kind.
MOESTRO_API int32_t moestro_peak_rates(int32_t kind, double seconds, int32_t runs, double* out) {
    if (kind < 0 || kind >= MachineKernels::kKinds) return fail(kBadShape, "no kind %d", kind);
    const Peak peak = kernels().machine.peaks[kind];
    if (peak.run == nullptr)
        return fail(kBadDtype, "level %s has no instruction for it", kernels().name);
    int64_t rounds = 1024;
    const auto time = [&] { return time_all([&](int64_t) { g_sink = peak.run(rounds); }); };
    while (time() < seconds / 4) rounds *= 2;
    rounds = std::max<int64_t>(1, static_cast<int64_t>(rounds * seconds / time()));
    const double operations = static_cast<double>(rounds) * peak.operations * num_workers();
    for (int32_t run = 0; run < runs; ++run) out[run] = operations / time();
    return kOk;
}

// Seconds of `regions` parallel regions of `tasks` tasks that do nothing but count to `work`.
MOESTRO_API double moestro_time_regions(int64_t regions, int64_t tasks, int64_t work) {
    const auto start = Clock::now();
    for (int64_t r = 0; r < regions; ++r)
        parallel(tasks, [work](int64_t, int) {
            for (int64_t i = 0; i < work; ++i) asm volatile("");
        });
    return seconds_since(start);
}
