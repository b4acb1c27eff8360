#include "core/free_ranges.h"

#include <algorithm>

namespace swarm_kv {

std::optional<uint64_t> FreeRanges::take(uint64_t length) {
  const auto range = std::find_if(ranges_.begin(), ranges_.end(),
                                  [&](const Range& range) { return range.length >= length; });
  if (range == ranges_.end()) return std::nullopt;
  const uint64_t offset = range->offset;
  if (range->length == length) {
    ranges_.erase(range);
  } else {
    range->offset += length;
    range->length -= length;
  }
  return offset;
}

void FreeRanges::give(uint64_t offset, uint64_t length) {
  auto next = std::lower_bound(ranges_.begin(), ranges_.end(), offset,
                               [](const Range& range, uint64_t at) { return range.offset < at; });
  const bool joins_next = next != ranges_.end() && next->offset == offset + length;
  if (next != ranges_.begin()) {
    Range& before = *std::prev(next);
    if (before.offset + before.length == offset) {
      before.length += length;
      if (joins_next) {
        before.length += next->length;
        ranges_.erase(next);
      }
      return;
    }
  }
  if (joins_next) {
    next->offset = offset;
    next->length += length;
  } else {
    ranges_.insert(next, {offset, length});
  }
}

uint64_t FreeRanges::trim(uint64_t end) {
  if (ranges_.empty() || ranges_.back().offset + ranges_.back().length != end) return end;
  const uint64_t offset = ranges_.back().offset;
  ranges_.pop_back();
  return offset;
}

uint64_t FreeRanges::longest() const {
  uint64_t longest = 0;
  for (const Range& range : ranges_) longest = std::max(longest, range.length);
  return longest;
}

}  // namespace swarm_kv
