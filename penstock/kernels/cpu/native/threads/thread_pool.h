// ThreadPool: carries out numbered items of work on the calling thread and its helpers.
//
// Items 0 .. count-1 are split into one contiguous range a thread, even ones or as the caller says. A thread takes from
// the front of its own range, and when that is empty from the back of the fullest other one: so neighbouring panels are
// read in order by one core, and a core that somebody else is using holds nobody up for longer than one item. Waiting
// spins briefly, then sleeps.
//
// Helpers inherit the affinity of the thread that makes the pool. A task must not throw, and must not run the pool. In
// a child that was forked between two runs there are no helpers: its caller does all items, correct but alone.
#pragma once

#include <cstdint>

namespace penstock {

class ThreadPool {
  public:
    // threads: all that compute, the caller included; at least 1.
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const;

    // Calls task(item, thread) for every item, each once, and returns when all have returned. `thread` is in
    // 0 .. threads()-1 and belongs to one running call at a time: it picks scratch memory, and must not change a
    // result. One thread at a time may call run.
    template <class Task>
    void run(std::int64_t count, const Task& task) {
        run_erased(count, nullptr, call<Task>, &task);
    }

    // The same with ranges that the caller has chosen: thread t begins with items starts[t] .. starts[t + 1] - 1.
    // starts: [threads() + 1], ascending from 0; the last one is the number of items.
    template <class Task>
    void run_ranges(const std::int64_t* starts, const Task& task) {
        run_erased(starts[threads()], starts, call<Task>, &task);
    }

  private:
    using Function = void (*)(const void*, std::int64_t, int);

    template <class Task>
    static void call(const void* task, std::int64_t item, int thread) {
        (*static_cast<const Task*>(task))(item, thread);
    }
    void run_erased(std::int64_t count, const std::int64_t* starts, Function function, const void* object);

    struct State;
    State* state_;
};

}  // namespace penstock
