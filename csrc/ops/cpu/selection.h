#pragma once

#include <cstdint>
#include <vector>

#include "ops/cluster_lists.h"

namespace swarm_kv::cpu {

// Cluster ids in descending score (ties: lower id) until they hold `budget` distinct entries. No
// score is NaN.
std::vector<int64_t> select_clusters(const float* scores, const ClusterLists& clusters,
                                     int64_t budget);

struct TwoLevelSelection {
  std::vector<int64_t> clusters;  // in the order taken
  std::vector<int64_t> entries;   // the single ones, ascending
};

// Greedy by probability not yet taken per read cost; see swarm_kv/ops.py. probs
// [clusters.entries], >= 0; budget < clusters.entries.
TwoLevelSelection select_two_level(const float* probs, const ClusterLists& clusters, int64_t budget,
                                   double request_cost, double single_share);

}  // namespace swarm_kv::cpu
