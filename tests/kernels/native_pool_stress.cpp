// Many short runs of the thread pool, from several pools at once. Exit code 1 where an item was not done exactly once,
// where two calls had the same thread number at a time, or where a run returned before its last item had.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "threads/thread_pool.h"

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
    pool.parallel_for(count, work);
    work.over = true;
    for (const int times : work.done) check(times == 1, "an item was not done exactly once");
}

// The same with a range for each thread that the test has chosen, often an empty one.
void run_ranges_once(penstock::ThreadPool& pool, Work& work, int count, unsigned seed) {
    std::vector<std::int64_t> starts(pool.threads() + 1, 0);
    for (int thread = 1; thread < pool.threads(); ++thread) starts[thread] = count > 0 ? (seed >> thread) % count : 0;
    std::sort(starts.begin(), starts.end() - 1);
    starts.back() = count;
    work.done.assign(count, 0);
    work.over = false;
    pool.parallel_for_ranges(starts.data(), work);
    work.over = true;
    for (const int times : work.done) check(times == 1, "an item of chosen ranges was not done exactly once");
}

void stress(int threads, int runs, unsigned seed) {
    penstock::ThreadPool pool(threads);
    Work works[2];
    for (int run = 0; run < runs; ++run) {
        seed = seed * 1664525 + 1013904223;
        const bool few = seed >> 16 & 1;
        const int count = seed >> 20 & (few ? 3 : 127);
        if (run % 3 == 0)
            run_ranges_once(pool, works[run % 2], count, seed);
        else
            run_once(pool, works[run % 2], count);
        if (run % 500 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));  // helpers fall asleep
    }
}

void long_run() {
    constexpr int COUNT = 200'000;  // more than one run holds
    penstock::ThreadPool pool(3);
    std::vector<int> done(COUNT, 0);
    pool.parallel_for(COUNT, [&](std::int64_t item, int) { ++done[item]; });
    for (const int times : done) check(times == 1, "an item of a long run was not done exactly once");

    const std::int64_t starts[] = {0, 10, 150'000, COUNT};  // the second range lies in three runs
    done.assign(COUNT, 0);
    pool.parallel_for_ranges(starts, [&](std::int64_t item, int) { ++done[item]; });
    for (const int times : done) check(times == 1, "an item of long ranges was not done exactly once");
}

// Both threads are in their first item at once, so each has taken it from the front of its own range.
void ranges_are_owned() {
    penstock::ThreadPool pool(2);
    for (const std::int64_t middle : {1, 3, 7}) {
        const std::int64_t starts[] = {0, middle, 8};
        std::atomic<int> begun{0};
        std::atomic<std::int64_t> first[2] = {{-1}, {-1}};
        pool.parallel_for_ranges(starts, [&](std::int64_t item, int thread) {
            if (first[thread] >= 0) return;
            first[thread] = item;
            begun.fetch_add(1);
            while (begun.load() < 2) std::this_thread::yield();
        });
        check(first[0] == 0 && first[1] == middle, "a thread did not begin with its own range");
    }
}

}  // namespace

int main(int, char** arguments) {
    const int runs = std::atoi(arguments[1]);
    std::vector<std::thread> callers;
    for (const int threads : {1, 2, 3, 4, 8}) callers.emplace_back(stress, threads, runs, threads);
    for (std::thread& caller : callers) caller.join();
    long_run();
    ranges_are_owned();
    return failed;
}
