// Fetching the next tile into the caches while this one is computed. Included by files that are compiled for a level.
//
// A core has few buffers for lines under way, and a burst of prefetches waits for them; spread evenly over the work
// they cost nothing. The order is that of memory, keys and values of a granule in one, so that the processor's own
// prefetching joins in.
#pragma once

#include "attention.h"

namespace penstock {
namespace {

class Fetch {
  public:
    // bytes: of a granule. Without a next tile there is nothing to do.
    Fetch(const TileArgs& a, std::int64_t bytes) : next_(a.next), bytes_(bytes), left_(0), granule_(TILE_GRANULES) {
        if (a.next[0] == nullptr) return;
        granule_ = 0;
        begin();
    }

    // The next few lines.
    inline __attribute__((always_inline)) void lines(int count) {
        for (; count > 0 && left_ > 0; --count) {
            __builtin_prefetch(at_, 0, 2);  // into the second cache
            at_ += LINE_BYTES;
            left_ -= LINE_BYTES;
            if (left_ <= 0 && ++granule_ < TILE_GRANULES) begin();
        }
    }

  private:
    static constexpr std::int64_t LINE_BYTES = 64;

    void begin() {
        at_ = next_[granule_];
        left_ = bytes_;
    }

    const char* const* next_;
    const char* at_ = nullptr;
    const std::int64_t bytes_;
    std::int64_t left_;
    int granule_;
};

}  // namespace
}  // namespace penstock
