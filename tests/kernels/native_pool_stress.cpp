// Many short runs of the thread pool, from several pools at once. Exit code 1 where an item was not done exactly once,
// where two calls had the same thread number at a time, or where a run returned before its last item had.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "thread_pool.h"

namespace {

constexpr int MAX_THREADS = 8;
std::atomic<bool> failed{false};

void check(bool condition, const char* what) {
    if (!condition && !failed.exchange(true)) std::fprintf(stderr, "%s\n", what);
}

// One run's task. It lies elsewhere than that of the run before, and knows when it is over: a helper that comes late
// and still holds it must not get an item of the next run. Items write plain memory, which the caller reads after the
// run: a race detector sees whether a run orders the two.
struct Work {
    mutable std::vector<int> done;
    mutable std::atomic<int> running[MAX_THREADS] = {};
    std::atomic<bool> over{true};

    void operator()(std::int64_t item, int thread) const {
        check(!over, "an item was done for a run that is over");
        check(running[thread].fetch_add(1) == 0, "two items ran under one thread number");
        for (volatile int spent = 0; spent < item % 7 * 20;) spent = spent + 1;
        ++done[item];
        running[thread].fetch_sub(1);
    }
};

void run_once(penstock::ThreadPool& pool, Work& work, int count) {
    work.done.assign(count, 0);
    work.over = false;
    pool.run(count, work);
    work.over = true;
    for (const int times : work.done) check(times == 1, "an item was not done exactly once");
}

void stress(int threads, int runs, unsigned seed) {
    penstock::ThreadPool pool(threads);
    Work works[2];
    for (int run = 0; run < runs; ++run) {
        seed = seed * 1664525 + 1013904223;
        const bool few = seed >> 16 & 1;
        run_once(pool, works[run % 2], seed >> 20 & (few ? 3 : 127));
        if (run % 500 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));  // helpers fall asleep
    }
}

void long_run() {
    constexpr int COUNT = 200'000;  // more than one run holds
    penstock::ThreadPool pool(3);
    std::vector<int> done(COUNT, 0);
    pool.run(COUNT, [&](std::int64_t item, int) { ++done[item]; });
    for (const int times : done) check(times == 1, "an item of a long run was not done exactly once");
}

}  // namespace

int main(int, char** arguments) {
    const int runs = std::atoi(arguments[1]);
    std::vector<std::thread> callers;
    for (const int threads : {1, 2, 3, 4, 8}) callers.emplace_back(stress, threads, runs, threads);
    for (std::thread& caller : callers) caller.join();
    long_run();
    return failed;
}
