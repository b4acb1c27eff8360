#pragma once

#include <cstdint>

#include "core/clusters.h"

namespace swarm_kv {

struct ClusterOptions {
  double tau = 0.6;            // cluster radius, in [0, 1]
  int64_t max_size = 64;       // members of one cluster, >= 1
  int64_t max_replicas = 3;    // copies of one entry, >= 1
  int64_t min_activation = 8;  // entries activated by fewer queries are cold, >= 1
};

// At most this many candidates, the nearest ones, are tried when a cluster grows.
inline constexpr int64_t kMaxGrowthCandidates = 512;

// Jaccard distance of two signatures with f_i and f_j bits set, f_ij of them in common; f_i + f_j >
// 0. It stands in for Eq. 2-3 of arXiv 2603.17803, which as printed put every distance next to 1.
inline double signature_distance(int64_t f_ij, int64_t f_i, int64_t f_j) {
  return 1.0 - static_cast<double>(f_ij) / static_cast<double>(f_i + f_j - f_ij);
}

// Algorithm 1 of arXiv 2603.17803 (section 5.1) on `bits` [num_entries, words], as
// activation_signatures writes them.
//
// The density of an entry is the number of others within tau (<=). Entries come in descending
// density (ties: lower id); the next one that no cluster covers becomes a medoid. Its candidates
// are all others within tau, covered ones included while they have fewer than max_replicas copies,
// in ascending distance (ties: lower id). A candidate joins when its mean distance to the members
// so far is <= tau (Eq. 5), else it is skipped, until max_size. Cold entries take no part in this:
// they follow the other clusters as singletons, in sequence order.
//
// Every entry is covered. The N x N distances are never stored: time is O(N^2 words / 8) at worst,
// memory a second copy of `bits` plus O(N) per thread. The result does not depend on the number of
// threads. Throws Error(kArgument) on sizes or options outside their limits; num_entries = 0 gives
// no clusters.
Clusters cluster_signatures(const int64_t* bits, int64_t num_entries, int64_t words,
                            const ClusterOptions& options);

// Clusters of `block` neighbours in sequence, the last one shorter: the layout in token order, and
// the baseline of pages. Throws Error(kArgument) if num_entries < 0 or block < 1.
Clusters sequence_blocks(int64_t num_entries, int64_t block);

}  // namespace swarm_kv
