#include "threads/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include "float_mode.h"

// glibc 2.32 and 2.34 gave these two a second version when they moved to another file. With the first one, the library
// loads wherever glibc is 2.28 or newer, whichever glibc it was linked with (tools/wheel.py).
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver pthread_sigmask, pthread_sigmask@GLIBC_2.2.5");
__asm__(".symver pthread_setaffinity_np, pthread_setaffinity_np@GLIBC_2.3.4");
#endif

namespace penstock {

namespace {

constexpr int CACHE_LINE = 64;
constexpr std::int64_t MAX_ITEMS = 0xffff;  // per run; more items are split into several runs
constexpr std::chrono::microseconds SPIN_FOR_RUN(50);    // by a helper; outlasts the gap between calls of one layer
constexpr std::chrono::microseconds SPIN_FOR_ITEMS(20);  // by the caller, and no longer: a helper may need its core
constexpr int CHECKS_PER_CLOCK = 32;

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Wait until `ready` is true, for at most `time`. Return whether it is.
template <class Ready>
bool spin_until(const Ready& ready, std::chrono::microseconds time) {
    if (ready()) return true;
    const auto end = std::chrono::steady_clock::now() + time;
    do {
        for (int i = 0; i < CHECKS_PER_CLOCK; ++i) {
            pause();
            if (ready()) return true;
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

// Sleep while the word has this value. May return early.
void sleep_while(std::atomic<std::uint32_t>& word, std::uint32_t value) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
    if (word.load() == value) std::this_thread::sleep_for(SPIN_FOR_ITEMS);
#endif
}

void wake(std::atomic<std::uint32_t>& word, int sleepers) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, sleepers, nullptr, nullptr, 0);
#else
    (void)word, (void)sleepers;
#endif
}

// The items begin .. end-1 of a run that are not taken yet, packed into one word. The word includes the number of the
// run, so that a late thread, which still holds the task of an earlier run, finds nothing to take.
struct Items {
    std::uint32_t run;
    std::uint32_t begin, end;  // 16 bits each

    static Items unpack(std::uint64_t word) {
        return {static_cast<std::uint32_t>(word >> 32), static_cast<std::uint32_t>(word >> 16 & 0xffff),
                static_cast<std::uint32_t>(word & 0xffff)};
    }
    std::uint64_t pack() const { return std::uint64_t{run} << 32 | begin << 16 | end; }
};

// A thread's range, alone in its cache line.
struct alignas(CACHE_LINE) Range {
    std::atomic<std::uint64_t> word{0};

    std::uint32_t left(std::uint32_t run) const {
        const Items items = Items::unpack(word.load(std::memory_order_relaxed));
        return items.run == run ? items.end - items.begin : 0;
    }

    // Take the first or the last item of this run. Return -1 if no item is left.
    std::int64_t take(std::uint32_t run, bool first) {
        std::uint64_t seen = word.load(std::memory_order_relaxed);
        for (;;) {
            Items items = Items::unpack(seen);
            if (items.run != run || items.begin == items.end) return -1;
            const std::uint32_t item = first ? items.begin++ : --items.end;
            if (word.compare_exchange_weak(seen, items.pack(), std::memory_order_acq_rel, std::memory_order_relaxed))
                return item;
        }
    }
};

}  // namespace

// A thread reads the task of a run before it takes an item. This is safe: as long as an item of run r is left, r has
// not finished, so the caller is still waiting and has not written the next run's task.
struct ThreadPool::State {
    explicit State(int count) : threads(count), ranges(new Range[count]), process(getpid()) {}

    const int threads;
    const std::unique_ptr<Range[]> ranges;
    const pid_t process;
    std::vector<std::thread> helpers;
    std::atomic<Function> function{nullptr};
    std::atomic<const void*> object{nullptr};
    std::atomic<std::int64_t> first{0};  // the task's item that is item 0 of the run
    std::atomic<bool> stopping{false};
    alignas(CACHE_LINE) std::atomic<std::uint32_t> run{0};  // helpers wait for it to change
    std::atomic<int> sleepers{0};
    alignas(CACHE_LINE) std::atomic<std::uint32_t> unfinished{0};  // items; the caller waits for it to be 0
    std::atomic<bool> caller_sleeps{false};

    // Helpers block all signals: only the threads that the program itself started handle them.
    void start_helpers() {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            for (int thread = 1; thread < threads; ++thread) helpers.emplace_back([this, thread] { help(thread); });
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            stop_helpers();
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void stop_helpers() {
        stopping.store(true);
        run.fetch_add(1);
        wake(run, threads);
        for (std::thread& helper : helpers) helper.join();
    }

    void help(int thread) {
        const FloatMode mode;  // not the mode of the creating thread
        for (std::uint32_t current = next_run(0); !stopping.load(); current = next_run(current)) work(current, thread);
    }

    // Wait for a run other than the last one this helper saw.
    std::uint32_t next_run(std::uint32_t last) {
        const auto changed = [&] { return run.load(std::memory_order_acquire) != last; };
        if (!spin_until(changed, SPIN_FOR_RUN)) {
            sleepers.fetch_add(1);
            while (!changed()) sleep_while(run, last);
            sleepers.fetch_sub(1);
        }
        return run.load(std::memory_order_acquire);
    }

    // Start a new run with items begin .. begin + count - 1 of the task. A helper counts itself as sleeping before the
    // kernel checks `run` for the last time, and the caller writes `run` before it reads `sleepers`. So at least one of
    // the two sees the other's change.
    void publish(std::int64_t begin, std::uint32_t count, const std::int64_t* starts) {
        const auto start_of = [=](int thread) {
            if (starts == nullptr) return static_cast<std::uint32_t>(std::uint64_t{count} * thread / threads);
            return static_cast<std::uint32_t>(std::clamp<std::int64_t>(starts[thread] - begin, 0, count));
        };
        first.store(begin, std::memory_order_relaxed);
        const std::uint32_t next = run.load(std::memory_order_relaxed) + 1;
        unfinished.store(count, std::memory_order_relaxed);
        for (int thread = 0; thread < threads; ++thread) {
            const Items items{next, start_of(thread), start_of(thread + 1)};
            ranges[thread].word.store(items.pack(), std::memory_order_relaxed);
        }
        run.store(next);
        if (sleepers.load() > 0) wake(run, static_cast<int>(std::min<std::uint32_t>(count - 1, threads)));
    }

    // Run items until none is left. `unfinished` is counted down as soon as the thread's own range is empty.
    void work(std::uint32_t current, int thread) {
        const Function call = function.load(std::memory_order_relaxed);
        const void* task = object.load(std::memory_order_relaxed);
        const std::int64_t begin = first.load(std::memory_order_relaxed);
        std::uint32_t done = 0;
        std::int64_t item;
        while ((item = ranges[thread].take(current, true)) >= 0) {
            call(task, begin + item, thread);
            ++done;
        }
        finish(done);
        while ((item = steal(current)) >= 0) {
            call(task, begin + item, thread);
            finish(1);
        }
    }

    // Take the last item of the fullest range. Return -1 if all ranges are empty.
    std::int64_t steal(std::uint32_t current) {
        for (;;) {
            Range* fullest = nullptr;
            std::uint32_t most = 0;
            for (int thread = 0; thread < threads; ++thread) {
                const std::uint32_t left = ranges[thread].left(current);
                if (left > most) most = left, fullest = &ranges[thread];
            }
            if (fullest == nullptr) return -1;
            const std::int64_t item = fullest->take(current, false);
            if (item >= 0) return item;
        }
    }

    void finish(std::uint32_t items) {
        if (items > 0 && unfinished.fetch_sub(items) == items && caller_sleeps.load()) wake(unfinished, 1);
    }

    void wait_for_items() {
        if (spin_until([&] { return unfinished.load(std::memory_order_acquire) == 0; }, SPIN_FOR_ITEMS)) return;
        caller_sleeps.store(true);
        for (std::uint32_t left; (left = unfinished.load()) != 0;) sleep_while(unfinished, left);
        caller_sleeps.store(false, std::memory_order_relaxed);
    }
};

ThreadPool::ThreadPool(int threads) {
    std::unique_ptr<State> state(new State(threads));
    state->start_helpers();
    state_ = state.release();
}

ThreadPool::~ThreadPool() {
    if (getpid() != state_->process) return;  // a forked child has no helpers to join and leaks the memory
    state_->stop_helpers();
    delete state_;
}

int ThreadPool::threads() const { return state_->threads; }

bool ThreadPool::pin(int thread, const std::int32_t* cpus, std::int64_t count) {
#if defined(__linux__)
    std::int32_t highest = 0;
    for (std::int64_t i = 0; i < count; ++i) highest = std::max(highest, cpus[i]);
    const std::size_t bytes = CPU_ALLOC_SIZE(static_cast<std::size_t>(highest) + 1);
    const std::unique_ptr<cpu_set_t, void (*)(void*)> set(static_cast<cpu_set_t*>(std::calloc(1, bytes)), std::free);
    if (set == nullptr) return false;
    for (std::int64_t i = 0; i < count; ++i) CPU_SET_S(static_cast<std::size_t>(cpus[i]), bytes, set.get());
    return pthread_setaffinity_np(state_->helpers[static_cast<std::size_t>(thread) - 1].native_handle(), bytes,
                                  set.get()) == 0;
#else
    (void)thread, (void)cpus, (void)count;
    return false;
#endif
}

void ThreadPool::run(std::int64_t count, const std::int64_t* starts, Function function, const void* object) {
    if (count <= 1 || state_->threads == 1) {
        for (std::int64_t item = 0; item < count; ++item) function(object, item, 0);
        return;
    }
    state_->function.store(function, std::memory_order_relaxed);
    state_->object.store(object, std::memory_order_relaxed);
    for (std::int64_t first = 0; first < count; first += MAX_ITEMS) {
        state_->publish(first, static_cast<std::uint32_t>(std::min(MAX_ITEMS, count - first)), starts);
        state_->work(state_->run.load(std::memory_order_relaxed), 0);
        state_->wait_for_items();
    }
}

}  // namespace penstock
