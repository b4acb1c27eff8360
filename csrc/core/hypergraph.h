#pragma once

#include <cstdint>

#include "core/clustering.h"

namespace swarm_kv {

// Clusters that lower the reads of the profiled queries directly: `bisect` lays the hot entries out
// so that what a query activates lies together, and its leaves are the clusters, in that order, so
// that neighbours on the drive tend to be wanted together too and their reads can merge. Each entry
// has one place there.
//
// The medoid, which comes first in a cluster, is the member of the smallest mean distance to the
// others by `distance`. Cold entries follow as in cluster_signatures. max_index_bytes keeps the
// clusters whose members are activated most often; the others' entries follow like cold ones.
//
// tau, max_replicas and seed play no part. Time is O(bits set * log(entries)) for each of up to 10
// rounds and O(entries * max_size * words) for the medoids, memory O(entries) beyond the result.
// The result does not depend on the number of threads. Throws Error(kArgument) as
// cluster_signatures does.
Clusters hypergraph_clusters(const int64_t* bits, int64_t num_entries, int64_t words,
                             const ClusterOptions& options);

}  // namespace swarm_kv
