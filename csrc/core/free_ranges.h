#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace swarm_kv {

// Free byte ranges of one address space: first fit to take, neighbours joined when given back.
// Keeps its memory.
class FreeRanges {
 public:
  // Offset of a range of exactly `length` bytes, or nothing when no free range is that long.
  std::optional<uint64_t> take(uint64_t length);
  // Returns [offset, offset + length) to the free ranges.
  void give(uint64_t offset, uint64_t length);
  // If the highest free range ends at `end`, removes it and returns its offset; otherwise `end`.
  uint64_t trim(uint64_t end);
  uint64_t longest() const;

 private:
  struct Range {
    uint64_t offset;
    uint64_t length;
  };
  std::vector<Range> ranges_;  // ascending, none touching the next
};

}  // namespace swarm_kv
