#pragma once

#include <cstdint>
#include <optional>

#include "core/free_ranges.h"

namespace swarm_kv {

// Allocator over the staging region that reads and writes go through. Offsets and sizes are
// multiples of kGranule, which satisfies every drive's memory alignment. Not thread-safe.
class Arena {
 public:
  static constexpr uint64_t kGranule = 4096;
  static constexpr uint64_t rounded(uint64_t bytes) {
    return (bytes + kGranule - 1) / kGranule * kGranule;
  }

  // Hands out [base, base + bytes); both are rounded down to the granule.
  explicit Arena(uint64_t bytes, uint64_t base = 0);

  // Offset of a free range of at least `bytes`, or nothing when no range is that long.
  std::optional<uint64_t> allocate(uint64_t bytes);
  // Gives back what was allocated, or a part of it that begins on a granule.
  void release(uint64_t offset, uint64_t bytes);

  uint64_t size() const { return size_; }
  uint64_t used() const { return used_; }
  uint64_t longest_free() const { return free_.longest(); }

 private:
  uint64_t size_;
  uint64_t used_ = 0;
  FreeRanges free_;
};

}  // namespace swarm_kv
