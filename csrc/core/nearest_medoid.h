#pragma once

#include <cstdint>

#include "core/clustering.h"

namespace swarm_kv {

// Algorithm 1 of arXiv 2603.17803 without its growth and its replicas: what the paper's ablation
// calls medoid only. Hot entries come in descending density (ties: lower id); one that is not
// within tau of a medoid so far becomes a medoid, and every other hot entry belongs to the nearest
// medoid alone (ties: the earlier one), whatever its distance to the other members.
//
// A cluster has its members in ascending distance to the medoid (ties: lower id); those beyond
// max_size make further clusters, cut off in this order. max_replicas and max_index_bytes play no
// part. The rest, entries alone included, and the limits are those of cluster_signatures.
Clusters nearest_medoid_clusters(const int64_t* bits, int64_t num_entries, int64_t words,
                                 const ClusterOptions& options);

}  // namespace swarm_kv
