#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace swarm_kv {

// Free byte ranges of one address space: first fit to take, neighbours joined when given back.
class FreeRanges {
 public:
  // Offset of a range of exactly `length` bytes, or nothing when no free range is that long.
  std::optional<uint64_t> take(uint64_t length);
  // Returns [offset, offset + length) to the free ranges.
  void give(uint64_t offset, uint64_t length);
  // If the highest free range ends at `end`, removes it and returns its offset; otherwise `end`.
  uint64_t trim(uint64_t end);

 private:
  std::map<uint64_t, uint64_t> ranges_;  // offset -> length
};

}  // namespace swarm_kv
