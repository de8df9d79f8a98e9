// Prefetching the next tile while the current one is computed. Included by files that are compiled for a level.
//
// A core has few buffers for outstanding cache lines: a burst of prefetches stalls the work, while prefetches that are
// distributed evenly over the work cost little. Granules are prefetched in memory order, keys then values, into the L2,
// so that the L1 keeps the data of the current tile.
#pragma once

#include "attention/attention.h"
#include "elements.inc.h"

namespace penstock {
namespace {

class Prefetcher {
  public:
    // work: the sum over all calls of `advance` for this tile, in any unit.
    Prefetcher(const TileArgs& a, int work) : next_(a.next) {
        if (a.next[0] == nullptr) return;
        bytes_ = static_cast<int>(granule_bytes(*a.cache) / LINE_BYTES * LINE_BYTES);
        rate_ = (TILE_GRANULES * (bytes_ / LINE_BYTES) * ONE + work - 1) / work;
        begin_granule();
    }

    // Prefetch the lines that are due after this much more work.
    inline __attribute__((always_inline)) void advance(int work) {
        for (owed_ += work * rate_; owed_ >= ONE; owed_ -= ONE) {
            if (line_ == end_) {
                if (granule_ == TILE_GRANULES) return;
                begin_granule();
            }
            prefetch_to_l2(line_);
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
    int rate_ = 0;  // lines per unit of work, in units of 1 / ONE
    int owed_ = 0;
};

}  // namespace
}  // namespace penstock
