// Fetching the next tile into the caches while this one is computed. Included by files that are compiled for a level.
//
// A core has few buffers for lines under way, and a burst of prefetches waits for them, and the work for the burst;
// spread evenly over the work they cost little. The order is that of memory, keys and values of a granule in one. The
// second-level cache is near enough, and the first keeps what this tile works on.
#pragma once

#include "attention/attention.h"

namespace penstock {
namespace {

class Fetch {
  public:
    // work: of all the calls of `after` for this tile together, in any unit.
    Fetch(const TileArgs& a, int work) : next_(a.next) {
        if (a.next[0] == nullptr) return;
        bytes_ = static_cast<int>(granule_bytes(*a.cache) / LINE_BYTES * LINE_BYTES);
        rate_ = (TILE_GRANULES * (bytes_ / LINE_BYTES) * ONE + work - 1) / work;
        begin_granule();
    }

    // After so much work: the lines that are due.
    inline __attribute__((always_inline)) void after(int work) {
        for (owed_ += work * rate_; owed_ >= ONE; owed_ -= ONE) {
            if (line_ == end_) {
                if (granule_ == TILE_GRANULES) return;
                begin_granule();
            }
            __builtin_prefetch(line_, 0, 2);
            line_ += LINE_BYTES;
        }
    }

  private:
    static constexpr int LINE_BYTES = 64;
    static constexpr int ONE = 1 << 16;

    inline __attribute__((always_inline)) void begin_granule() {
        line_ = next_[granule_++];
        end_ = line_ + bytes_;
    }

    const char* const* next_;
    const char* line_ = nullptr;
    const char* end_ = nullptr;
    int granule_ = 0;
    int bytes_ = 0;
    int rate_ = 0;  // lines for a unit of work, in units of 1 / ONE
    int owed_ = 0;
};

}  // namespace
}  // namespace penstock
