#pragma once

#include <cstdint>
#include <vector>

#include "core/cache_policy.h"
#include "core/eviction_queue.h"

namespace swarm_kv {

// "swarm": counters of activations that fall while an entry is cached and idle (section 6.2),
// weighed by Eq. 6.
//
// A cached entry's counter is kept as the step at which it will have fallen to 0, which idle steps
// do not change: no step looks at the entries that it does not activate. Entries on drives of equal
// cost leave in the order of these steps; drives of different cost are compared at their least
// entries.
class CounterPolicy : public CachePolicy {
 public:
  void begin(const Segment& segment, const std::vector<DriveShape>& drives) override;
  // The expected counter after the profile, had the entry been cached throughout: a random walk.
  void prime(std::span<const int32_t> activations, int64_t queries) override;
  void touch(std::span<const int32_t> entries) override;
  double worth(int32_t entry) const override;
  void insert(int32_t entry) override;
  int32_t pop() override;
  void restore(int32_t entry) override;
  void leave(int32_t entry) override;
  void erase(int32_t entry) override;
  uint64_t bytes() const override;

 private:
  struct Cost {
    double t_base;      // seconds per request
    double t_transfer;  // seconds per entry
    bool operator==(const Cost&) const = default;
  };

  int32_t counter(int32_t entry) const;

  int32_t step_ = 0;
  // Per entry: while cached, the step at which the counter is 0; else the counter.
  std::vector<int32_t> value_;
  std::vector<uint8_t> cached_;
  std::vector<uint16_t> cost_;  // per entry: which of costs_
  std::vector<Cost> costs_;
  EvictionQueue<int32_t> queue_{0};  // a lane for each of costs_
};

}  // namespace swarm_kv
