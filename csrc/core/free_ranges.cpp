#include "core/free_ranges.h"

#include <iterator>

namespace swarm_kv {

std::optional<uint64_t> FreeRanges::take(uint64_t length) {
  for (auto range = ranges_.begin(); range != ranges_.end(); ++range) {
    if (range->second < length) continue;
    const uint64_t offset = range->first;
    const uint64_t rest = range->second - length;
    ranges_.erase(range);
    if (rest > 0) ranges_[offset + length] = rest;
    return offset;
  }
  return std::nullopt;
}

void FreeRanges::give(uint64_t offset, uint64_t length) {
  auto next = ranges_.lower_bound(offset);
  if (next != ranges_.end() && next->first == offset + length) {
    length += next->second;
    next = ranges_.erase(next);
  }
  if (next != ranges_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += length;
      return;
    }
  }
  ranges_[offset] = length;
}

uint64_t FreeRanges::trim(uint64_t end) {
  if (ranges_.empty()) return end;
  const auto last = std::prev(ranges_.end());
  if (last->first + last->second != end) return end;
  const uint64_t offset = last->first;
  ranges_.erase(last);
  return offset;
}

}  // namespace swarm_kv
