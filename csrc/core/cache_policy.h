#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/segment.h"

namespace swarm_kv {

// Which cached entries leave first: those with the lowest heat.
class CachePolicy {
 public:
  virtual ~CachePolicy() = default;

  // Called once per decoding step with the entries that the step activated.
  virtual void touch(Residency& residency, std::span<const int32_t> entries) const = 0;

  // Called once, before any step, with how many of a profile's `queries` activated each entry: the
  // heat as if decoding had gone on like the profile for long.
  virtual void prime(Residency& residency, std::span<const int32_t> activations,
                     int64_t queries) const = 0;
};

// "decayed_frequency": activations counted with a decay of 0.9 per step; keeps the working set
// where "lru", the time of the last activation, thrashes. Throws Error(kArgument) listing the
// names.
std::unique_ptr<CachePolicy> make_cache_policy(const std::string& name);

}  // namespace swarm_kv
