#include "thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace moestro {
namespace {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Returns at once when word is not `seen`; may return without cause.
void sleep_while(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
    if (word.load() == seen) std::this_thread::sleep_for(std::chrono::microseconds(200));
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

// Looks at `done` for some microseconds, the time between two kernels of a graph, then up to
// `patience` more; false when that is over and the thread should sleep. A look costs nobody
// anything where each thread has a core, and saves a wake-up, which takes tens of microseconds.
// Where cores are short, the thread that is waited for may need this very core: `polite` offers it
// between looks to whoever waits for one.
template <class Done>
bool spin_until(const Done& done, std::chrono::microseconds patience, bool polite) {
    using Clock = std::chrono::steady_clock;
    constexpr int kFirstLooks = 64, kLooks = 16;
    for (int look = 0; look < kFirstLooks; ++look) {
        if (done()) return true;
        relax();
    }
    const auto stop = Clock::now() + patience;
    do {
        if (polite) std::this_thread::yield();
        for (int look = 0; look < kLooks; ++look) {
            if (done()) return true;
            relax();
        }
    } while (Clock::now() < stop);
    return done();
}

// A caller holds results that somebody waits for: it keeps its core for a short while, then sleeps
// and is woken. Giving the core away would cost it a whole time slice when other programs run.
constexpr std::chrono::microseconds kCallerPatience{20};
// A worker without work is in nobody's way when it offers its core; it looks for as long as the
// gap between two calls from Python.
constexpr std::chrono::microseconds kWorkerPatience{50};

constexpr uint32_t kResting = 0, kWorking = 1, kAwaited = 2;

// One worker's part of a job: tasks [begin, end), begin in the upper half. The worker takes from
// the front, so that it walks through memory in order; one who has nothing left takes over the
// latter half. A range of tasks never comes back, so comparing it is enough to change it safely.
// state: whether the worker is at the job, and whether the caller sleeps until it is not.
struct alignas(128) Share {
    std::atomic<uint64_t> tasks{0};
    std::atomic<uint32_t> state{kResting};
};

constexpr uint64_t range(uint64_t begin, uint64_t end) { return begin << 32 | end; }

class Pool {
  public:
    static constexpr int64_t kMostTasks = int64_t{1} << 31;  // of one run

    explicit Pool(int workers) : workers_(workers), shares_(new Share[workers]) {
        for (int id = 1; id < workers; ++id) {
            try {
                threads_.emplace_back([this, id] { work(id); });
            } catch (const std::system_error&) {
                workers_ = id;  // the system gives no more threads: go on with these
                break;
            }
        }
    }

    ~Pool() {
        stop_.store(true);
        ticket_.fetch_add(2);
        wake_all(ticket_);
        for (auto& thread : threads_) thread.join();
    }

    // A worker that wakes late finds the job closed and leaves it alone, so the caller waits only
    // for those that took part (and for one that is just looking).
    void run(Task task, void* context, int64_t first, int64_t count, int limit) {
        team_ = static_cast<int>(std::min<int64_t>({limit, workers_, count}));
        task_ = task;
        context_ = context;
        first_ = first;
        for (int64_t id = 0; id < team_; ++id)
            shares_[id].tasks.store(range(count * id / team_, count * (id + 1) / team_),
                                    std::memory_order_relaxed);
        ticket_.fetch_add(1);  // odd: open
        if (sleepers_.load() > 0) wake_all(ticket_);
        take(0);
        ticket_.fetch_add(1);  // even: closed
        for (int id = 1; id < workers_; ++id) wait_for(shares_[id].state);
    }

  private:
    void take(int worker) {
        do {
            for (int64_t index; (index = next_of(shares_[worker].tasks)) >= 0;)
                task_(context_, first_ + index, worker);
        } while (take_over(worker));
    }

    static int64_t next_of(std::atomic<uint64_t>& tasks) {
        uint64_t now = tasks.load(std::memory_order_relaxed);
        while (now >> 32 < (now & 0xffffffffu))
            if (tasks.compare_exchange_weak(now, now + (uint64_t{1} << 32),
                                            std::memory_order_relaxed))
                return static_cast<int64_t>(now >> 32);
        return -1;
    }

    // Moves the latter half of what another one has left into this worker's empty share.
    bool take_over(int worker) {
        for (int step = 1; step < team_; ++step) {
            auto& tasks = shares_[(worker + step) % team_].tasks;
            uint64_t now = tasks.load(std::memory_order_relaxed);
            for (uint64_t begin, end; (begin = now >> 32) < (end = now & 0xffffffffu);) {
                const uint64_t middle = begin + (end - begin) / 2;
                if (!tasks.compare_exchange_weak(now, range(begin, middle),
                                                 std::memory_order_relaxed))
                    continue;
                shares_[worker].tasks.store(range(middle, end), std::memory_order_relaxed);
                return true;
            }
        }
        return false;
    }

    static void wait_for(std::atomic<uint32_t>& state) {
        if (spin_until([&] { return state.load() == kResting; }, kCallerPatience, false)) return;
        uint32_t now = kWorking;
        while (now != kResting)
            if (now == kAwaited || state.compare_exchange_strong(now, kAwaited)) {
                sleep_while(state, kAwaited);
                now = state.load();
            }
    }

    void work(int id) {
        auto& state = shares_[id].state;
        uint32_t seen = 0;
        for (;;) {
            seen = next_ticket(seen);
            if (stop_.load()) return;
            // Either this worker sees that the job is closed, or the caller that it takes part.
            state.store(kWorking);
            if (ticket_.load() == seen && id < team_) take(id);
            if (state.exchange(kResting) == kAwaited) wake_all(state);
        }
    }

    // The ticket of the next open job after `seen`, or any when the pool ends.
    uint32_t next_ticket(uint32_t seen) {
        uint32_t now = seen;
        const auto open = [&] {
            now = ticket_.load();
            return (now != seen && now % 2 == 1) || stop_.load(std::memory_order_relaxed);
        };
        while (!spin_until(open, kWorkerPatience, true)) {
            sleepers_.fetch_add(1);
            while (!open()) sleep_while(ticket_, now);
            sleepers_.fetch_sub(1);
        }
        return now;
    }

    int workers_;
    std::unique_ptr<Share[]> shares_;
    // The job: written by the caller while the ticket is even, read while it is odd.
    alignas(128) std::atomic<uint32_t> ticket_{0};
    int team_ = 0;
    Task task_ = nullptr;
    void* context_ = nullptr;
    int64_t first_ = 0;
    alignas(128) std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    std::vector<std::thread> threads_;
};

// Processors that this process may run on.
int num_processors() {
#if defined(__linux__)
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return CPU_COUNT(&allowed);
#endif
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

std::atomic<bool> g_busy{false};  // the pool runs a job or is being replaced
Pool* g_pool = nullptr;
std::atomic<int> g_workers{1};
bool g_oversubscribe = false;

struct Use {
    bool held = !g_busy.exchange(true, std::memory_order_acquire);
    Use() = default;
    Use(const Use&) = delete;
    ~Use() {
        if (held) g_busy.store(false, std::memory_order_release);
    }
};

// A child has none of its parent's threads, and the pool may have been in use: start from nothing.
void forget_after_fork() {
    g_busy.store(false);
    g_pool = nullptr;
}

struct ForkHandler {
    ForkHandler() {
#if defined(__unix__) || defined(__APPLE__)
        pthread_atfork(nullptr, nullptr, forget_after_fork);
#endif
    }
} g_fork_handler;

class Scratch {
  public:
    ~Scratch() { release(); }

    void* get(size_t bytes) {
        if (bytes <= size_) return data_;
        release();
        const size_t align = bytes >= kHuge ? kHuge : 64;
        const size_t size = (bytes + align - 1) / align * align;
        data_ = std::aligned_alloc(align, size);
        if (data_ == nullptr) return nullptr;
        size_ = size;
#if defined(__linux__)
        if (align == kHuge) madvise(data_, size, MADV_HUGEPAGE);
#endif
        return data_;
    }

    void release() {
        std::free(data_);
        data_ = nullptr;
        size_ = 0;
    }

  private:
    static constexpr size_t kHuge = size_t{2} << 20;
    void* data_ = nullptr;
    size_t size_ = 0;
};

thread_local Scratch t_scratch;

}  // namespace

void parallel_for(int64_t count, Task task, void* context, int max_workers) {
    const int wanted = num_workers();
    if (count > 1 && wanted > 1 && max_workers != 1) {
        const Use use;
        if (use.held) {
            if (g_pool == nullptr)
                g_pool = new Pool(g_oversubscribe ? wanted : std::min(wanted, num_processors()));
            const int limit = max_workers > 0 ? max_workers : wanted;
            for (int64_t first = 0; first < count; first += Pool::kMostTasks)
                g_pool->run(task, context, first, std::min(count - first, Pool::kMostTasks), limit);
            return;
        }
    }
    for (int64_t index = 0; index < count; ++index) task(context, index, 0);
}

int num_workers() { return g_workers.load(std::memory_order_relaxed); }

void set_num_workers(int count, bool oversubscribe) {
    for (;;) {
        const Use use;
        if (!use.held) {
            std::this_thread::sleep_for(std::chrono::microseconds(50));
            continue;
        }
        delete g_pool;
        g_pool = nullptr;
        g_oversubscribe = oversubscribe;
        g_workers.store(count < 1 ? 1 : count, std::memory_order_relaxed);
        return;
    }
}

void* call_scratch(size_t bytes) { return t_scratch.get(bytes); }

void release_scratch() { t_scratch.release(); }

}  // namespace moestro
