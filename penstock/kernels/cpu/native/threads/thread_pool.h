// ThreadPool: runs numbered items of work on the calling thread and its helpers.
//
// Items 0 .. count-1 are split into one contiguous range per thread. A thread takes items from the front of its own
// range and, when that is empty, from the back of the fullest other range. So one core reads neighbouring panels in
// order, and a core that another process is using delays the other cores by one item at most. A waiting thread spins
// briefly, then sleeps.
//
// Helpers inherit the affinity of the thread that creates the pool, unless they are pinned. A task must not throw and
// must not use the pool.
// A forked child has no helpers, so its calling thread runs all items alone.
#pragma once

#include <algorithm>
#include <cstdint>

namespace penstock {

class ThreadPool {
  public:
    // threads: the number of computing threads, the caller included; at least 1.
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const;

    // Let a helper (1 .. threads()-1) run on these CPUs only. Return whether the system allowed it.
    bool pin(int thread, const std::int32_t* cpus, std::int64_t count);

    // Call task(item, thread) once for every item, and return when all calls have returned. `thread` is in
    // 0 .. threads()-1 and belongs to one running call at a time: it selects scratch memory and must not change a
    // result. `serial`: the calling thread runs all items, for work that takes no longer than waking a helper. Only one
    // thread at a time may call this function.
    template <class Task>
    void parallel_for(std::int64_t count, const Task& task, bool serial = false) {
        if (!serial) return run(count, nullptr, call<Task>, &task);
        for (std::int64_t item = 0; item < count; ++item) task(item, 0);
    }

    // Call task(first, size, thread) for blocks of `block` items that cover 0 .. count-1; if serial, for one block.
    template <class Task>
    void parallel_for_blocks(std::int64_t count, std::int64_t block, const Task& task, bool serial = false) {
        if (serial) block = std::max<std::int64_t>(count, 1);
        parallel_for(
            (count + block - 1) / block,
            [&](std::int64_t index, int thread) {
                task(index * block, std::min(block, count - index * block), thread);
            },
            serial);
    }

    // parallel_for with given ranges: thread t begins with items starts[t] .. starts[t + 1] - 1.
    // starts: [threads() + 1], ascending from 0; the last entry is the number of items.
    template <class Task>
    void parallel_for_ranges(const std::int64_t* starts, const Task& task) {
        run(starts[threads()], starts, call<Task>, &task);
    }

  private:
    using Function = void (*)(const void*, std::int64_t, int);

    template <class Task>
    static void call(const void* task, std::int64_t item, int thread) {
        (*static_cast<const Task*>(task))(item, thread);
    }
    void run(std::int64_t count, const std::int64_t* starts, Function function, const void* object);

    struct State;
    State* state_;
};

}  // namespace penstock
