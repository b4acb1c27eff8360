#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace swarm_kv {

struct JoinOptions {
  std::string distance = "jaccard";  // "jaccard", "conditional" or "global"
  double tau = 0.5;                  // radius, in [0, 1]: strictly below it joins
  int64_t steps = 1;                 // that were observed, >= 1; bits beyond them are 0
  int64_t max_replicas = 3;          // clusters that one entry may join, >= 1
};

// Entry i joins homes[rows[i] .. rows[i + 1]), nearest first.
struct Homes {
  std::vector<int64_t> rows{0};
  std::vector<int64_t> homes;
};

// Which clusters do entries that leave the window belong to (arXiv 2603.17803 section 6.2, Eq. 9)?
//
// bits [num_entries, words] and medoid_bits [num_clusters, words]: bit t says that the entry, or
// the cluster's medoid, was active in step t. The distance of entry and medoid is that of
// SignatureDistance; "global" stands for Eq. 9 as printed, 1 - f / steps, in which whatever is
// active often is near to everything that is. An entry joins the up to max_replicas nearest
// clusters below tau; without any, the nearest one, and none if it was never active together with a
// medoid (the caller founds a cluster). Ties go to the lower cluster.
//
// Time is num_entries * num_clusters * words; the result does not depend on the number of threads.
// Throws Error(kArgument) on options outside their limits.
Homes join_clusters(const int64_t* bits, int64_t num_entries, const int64_t* medoid_bits,
                    int64_t num_clusters, int64_t words, const JoinOptions& options);

}  // namespace swarm_kv
