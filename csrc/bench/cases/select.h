#pragma once

#include <cstdint>
#include <vector>

#include "bench/cases/data.h"
#include "ops/cpu/intervals.h"
#include "ops/cpu/selection.h"

namespace swarm_kv::bench {

inline constexpr double kRequestCost = 1.5;  // as in swarm_kv/ops.py

// A tenth of the entries as intervals of the layout.
class SelectIntervals {
 public:
  explicit SelectIntervals(int64_t entries)
      : order_(random_.permutation(entries)), probs_(skewed(order_, entries, random_)) {}

  void run() {
    selected_ = cpu::select_intervals(probs_.data(), items(), order_.data(), items(), items() / 10,
                                      kRequestCost);
  }
  int64_t items() const { return static_cast<int64_t>(order_.size()); }
  int64_t bytes() const { return 8 * items(); }

 private:
  Random random_{7};
  std::vector<int32_t> order_;
  std::vector<float> probs_;
  std::vector<int64_t> selected_;
};

// The same budget as whole clusters and single entries, where entries have 1.4 copies.
class SelectTwoLevel {
 public:
  explicit SelectTwoLevel(int64_t entries)
      : clusters_(scattered_clusters(entries, 2 * entries / 5, random_)),
        probs_(skewed(clusters_.members, entries, random_)) {}

  void run() {
    const ClusterLists lists{clusters_.offsets.data(), clusters_.members.data(), clusters_.count(),
                             items()};
    selected_ = cpu::select_two_level(probs_.data(), lists, items() / 10, kRequestCost, 0.3);
  }
  int64_t items() const { return static_cast<int64_t>(probs_.size()); }
  int64_t bytes() const { return 4 * (items() + static_cast<int64_t>(clusters_.members.size())); }

 private:
  Random random_{8};
  Clusters clusters_;
  std::vector<float> probs_;
  cpu::TwoLevelSelection selected_;
};

}  // namespace swarm_kv::bench
