#include "thread_pool.h"

namespace penstock {

struct ThreadPool::State {
    int threads;
};

ThreadPool::ThreadPool(int threads) : state_(new State{threads}) {}

ThreadPool::~ThreadPool() { delete state_; }

int ThreadPool::threads() const { return state_->threads; }

void ThreadPool::run_erased(std::int64_t count, Function function, const void* object) {
    for (std::int64_t item = 0; item < count; ++item) function(object, item, 0);
}

}  // namespace penstock
