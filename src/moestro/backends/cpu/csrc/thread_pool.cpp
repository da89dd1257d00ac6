#include "thread_pool.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
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

// How often a worker looks for work before it sleeps: some tens of microseconds, the gap between
// two kernels of one step.
constexpr int kSpins = 2000;

struct Job {
    Task task = nullptr;
    void* context = nullptr;
    int64_t count = 0;
    int limit = 0;
};

class Pool {
  public:
    explicit Pool(int workers) : workers_(workers) {
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
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    int workers() const { return workers_; }

    // A worker that wakes late finds the job closed and leaves it alone, so the caller waits only
    // for those that took part.
    void run(const Job& job) {
        job_ = job;
        next_.store(0, std::memory_order_relaxed);
        open_.store(true, std::memory_order_seq_cst);
        generation_.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) > 0) {
            {
                std::lock_guard<std::mutex> lock(mutex_);
            }
            wake_.notify_all();
        }
        take(0);
        open_.store(false, std::memory_order_seq_cst);
        for (int spins = 0; active_.load(std::memory_order_seq_cst) > 0; ++spins) {
            if (spins < kSpins)
                relax();
            else
                std::this_thread::yield();
        }
    }

  private:
    void take(int worker) {
        for (;;) {
            const int64_t index = next_.fetch_add(1, std::memory_order_relaxed);
            if (index >= job_.count) return;
            job_.task(job_.context, index, worker);
        }
    }

    void work(int id) {
        uint64_t seen = 0;
        for (;;) {
            seen = wait(seen);
            if (stop_) return;
            active_.fetch_add(1, std::memory_order_seq_cst);
            if (open_.load(std::memory_order_seq_cst) && id < job_.limit) take(id);
            active_.fetch_sub(1, std::memory_order_seq_cst);
        }
    }

    uint64_t wait(uint64_t seen) {
        for (int spin = 0; spin < kSpins; ++spin) {
            const uint64_t now = generation_.load(std::memory_order_acquire);
            if (now != seen) return now;
            relax();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock,
                   [&] { return generation_.load(std::memory_order_seq_cst) != seen || stop_; });
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
        return generation_.load(std::memory_order_acquire);
    }

    int workers_;
    Job job_;
    alignas(64) std::atomic<uint64_t> generation_{0};
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> active_{0};
    std::atomic<bool> open_{false};
    std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<bool> stop_{false};
    std::vector<std::thread> threads_;
};

std::mutex* g_use = new std::mutex;  // held while the pool runs a job or is replaced
Pool* g_pool = nullptr;
std::atomic<int> g_workers{1};

// A child has none of its parent's threads, and a lock may have been held: start from nothing.
void forget_after_fork() {
    g_use = new std::mutex;
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
    const int wanted = g_workers.load(std::memory_order_relaxed);
    if (count > 1 && wanted > 1 && max_workers != 1) {
        std::unique_lock<std::mutex> lock(*g_use, std::try_to_lock);
        if (lock.owns_lock()) {
            if (g_pool == nullptr || g_pool->workers() > wanted) {
                delete g_pool;
                g_pool = new Pool(wanted);
            }
            g_pool->run({task, context, count, max_workers > 0 ? max_workers : wanted});
            return;
        }
    }
    for (int64_t index = 0; index < count; ++index) task(context, index, 0);
}

int num_workers() { return g_workers.load(std::memory_order_relaxed); }

void set_num_workers(int count) {
    std::lock_guard<std::mutex> lock(*g_use);
    delete g_pool;
    g_pool = nullptr;
    g_workers.store(count < 1 ? 1 : count, std::memory_order_relaxed);
}

void* call_scratch(size_t bytes) { return t_scratch.get(bytes); }

void release_scratch() { t_scratch.release(); }

}  // namespace moestro
