#include "core/read_round.h"

namespace swarm_kv {

void LateRanges::add(const std::vector<ArenaRange>& ranges) {
  if (ranges.empty()) return;
  const std::lock_guard lock(mutex_);
  ranges_.insert(ranges_.end(), ranges.begin(), ranges.end());
}

void LateRanges::take(std::vector<ArenaRange>& ranges) {
  ranges.clear();
  const std::lock_guard lock(mutex_);
  ranges.swap(ranges_);
}

}  // namespace swarm_kv
