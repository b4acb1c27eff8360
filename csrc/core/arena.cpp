#include "core/arena.h"

namespace swarm_kv {

Arena::Arena(uint64_t bytes, uint64_t base) : size_(bytes / kGranule * kGranule) {
  if (size_ > 0) free_.give(base / kGranule * kGranule, size_);
}

std::optional<uint64_t> Arena::allocate(uint64_t bytes) {
  const uint64_t length = rounded(bytes);
  const auto offset = free_.take(length);
  if (offset) {
    held_[*offset] = length;
    used_ += length;
  }
  return offset;
}

void Arena::release(uint64_t offset) {
  const auto held = held_.find(offset);
  if (held == held_.end()) return;
  used_ -= held->second;
  free_.give(held->first, held->second);
  held_.erase(held);
}

}  // namespace swarm_kv
