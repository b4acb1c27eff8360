#include "core/reuse_distance.h"

#include <algorithm>

#include "core/mix.h"

namespace swarm_kv {

ReuseSample::ReuseSample(int64_t entries, uint64_t seed) : seed_(mix(seed)) {
  const double share =
      static_cast<double>(kSample) / static_cast<double>(std::max<int64_t>(entries, 1));
  threshold_ = share >= 1 ? ~uint64_t{0} : static_cast<uint64_t>(share * 0x1p64);
  for (int32_t entry = 0; entry < entries; ++entry) {
    if (sampled(entry)) entries_.push_back(entry);
  }
  entries_.shrink_to_fit();
  share_ =
      static_cast<double>(entries_.size()) / static_cast<double>(std::max<int64_t>(entries, 1));
  active_.resize(entries_.size());
  stack_.reserve(entries_.size());
  idle_.reserve(entries_.size());
  touched_.reserve(entries_.size());
}

bool ReuseSample::sampled(int32_t entry) const {
  return mix(seed_ + static_cast<uint64_t>(entry) * kMixStep) <= threshold_;
}

void ReuseSample::touch(std::span<const int32_t> entries, ReuseDistances& distances) {
  distances.expected += share_ * static_cast<double>(entries.size());
  touched_.clear();
  for (const int32_t entry : entries) {
    if (!sampled(entry)) continue;
    const auto found = std::lower_bound(entries_.begin(), entries_.end(), entry);
    touched_.push_back(static_cast<int32_t>(found - entries_.begin()));
    active_[touched_.back()] = 1;
  }
  if (touched_.empty()) return;
  idle_.clear();
  uint64_t known = 0;
  for (size_t depth = 0; depth < stack_.size(); ++depth) {
    if (!active_[stack_[depth]]) {
      idle_.push_back(stack_[depth]);
      continue;
    }
    ++known;
    ++distances.count[((depth + 1) * ReuseDistances::kBuckets - 1) / entries_.size()];
  }
  distances.first += touched_.size() - known;
  for (const int32_t sample : touched_) active_[sample] = 0;
  stack_.assign(touched_.begin(), touched_.end());
  stack_.insert(stack_.end(), idle_.begin(), idle_.end());
}

uint64_t ReuseSample::bytes() const {
  return entries_.size() * (4 * sizeof(int32_t) + sizeof(active_[0]));
}

}  // namespace swarm_kv
