#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/clustering.h"

namespace swarm_kv {

// How entries are grouped into clusters: the seam for other strategies.
class Clusterer {
 public:
  virtual ~Clusterer() = default;

  // bits [num_entries, words] as activation_signatures writes them; a strategy that does not look
  // at them takes null.
  virtual Clusters cluster(const int64_t* bits, int64_t num_entries, int64_t words,
                           const ClusterOptions& options) const = 0;
};

// "swarm"            cluster_signatures: Algorithm 1.
// "no_replica"       the same with max_replicas = 1, whatever is asked: an ablation.
// "medoid_only"      nearest_medoid_clusters: another ablation.
// "hypergraph"       hypergraph_clusters.
// "sequence_blocks"  blocks of options.max_size neighbours.
// Throws Error(kArgument) that lists the known names.
std::unique_ptr<Clusterer> make_clusterer(const std::string& name);

// Names that make_clusterer accepts.
std::vector<std::string> clusterer_names();

}  // namespace swarm_kv
