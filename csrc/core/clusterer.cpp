#include "core/clusterer.h"

#include "core/hypergraph.h"
#include "core/nearest_medoid.h"
#include "core/registry.h"

namespace swarm_kv {
namespace {

class SwarmClusterer final : public Clusterer {
 public:
  Clusters cluster(const int64_t* bits, int64_t num_entries, int64_t words,
                   const ClusterOptions& options) const override {
    return cluster_signatures(bits, num_entries, words, options);
  }
};

class NoReplicaClusterer final : public Clusterer {
 public:
  Clusters cluster(const int64_t* bits, int64_t num_entries, int64_t words,
                   const ClusterOptions& options) const override {
    ClusterOptions disjoint = options;
    disjoint.max_replicas = 1;
    return cluster_signatures(bits, num_entries, words, disjoint);
  }
};

class MedoidOnlyClusterer final : public Clusterer {
 public:
  Clusters cluster(const int64_t* bits, int64_t num_entries, int64_t words,
                   const ClusterOptions& options) const override {
    return nearest_medoid_clusters(bits, num_entries, words, options);
  }
};

class HypergraphClusterer final : public Clusterer {
 public:
  Clusters cluster(const int64_t* bits, int64_t num_entries, int64_t words,
                   const ClusterOptions& options) const override {
    return hypergraph_clusters(bits, num_entries, words, options);
  }
};

class SequenceClusterer final : public Clusterer {
 public:
  Clusters cluster(const int64_t*, int64_t num_entries, int64_t words,
                   const ClusterOptions& options) const override {
    check_options(num_entries, words, options);
    return sequence_blocks(num_entries, options.max_size);
  }
};

const Registry<Clusterer>& registry() {
  static const Registry<Clusterer> kRegistry(
      "clusterer", {registered<Clusterer, SwarmClusterer>("swarm"),
                    registered<Clusterer, NoReplicaClusterer>("no_replica"),
                    registered<Clusterer, MedoidOnlyClusterer>("medoid_only"),
                    registered<Clusterer, HypergraphClusterer>("hypergraph"),
                    registered<Clusterer, SequenceClusterer>("sequence_blocks")});
  return kRegistry;
}

}  // namespace

std::unique_ptr<Clusterer> make_clusterer(const std::string& name) { return registry().make(name); }

std::vector<std::string> clusterer_names() { return registry().names(); }

}  // namespace swarm_kv
