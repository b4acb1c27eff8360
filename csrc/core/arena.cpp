#include "core/arena.h"

namespace swarm_kv {

Arena::Arena(uint64_t bytes, uint64_t base) : size_(bytes / kGranule * kGranule) {
  if (size_ > 0) free_.give(base / kGranule * kGranule, size_);
}

std::optional<uint64_t> Arena::allocate(uint64_t bytes) {
  const auto offset = free_.take(rounded(bytes));
  if (offset) used_ += rounded(bytes);
  return offset;
}

void Arena::release(uint64_t offset, uint64_t bytes) {
  used_ -= rounded(bytes);
  free_.give(offset, rounded(bytes));
}

}  // namespace swarm_kv
