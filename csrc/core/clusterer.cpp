#include "core/clusterer.h"

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

class SequenceClusterer final : public Clusterer {
 public:
  Clusters cluster(const int64_t*, int64_t num_entries, int64_t,
                   const ClusterOptions& options) const override {
    return sequence_blocks(num_entries, options.max_size);
  }
};

const Registry<Clusterer>& registry() {
  static const Registry<Clusterer> kRegistry(
      "clusterer", {registered<Clusterer, SwarmClusterer>("swarm"),
                    registered<Clusterer, SequenceClusterer>("sequence_blocks")});
  return kRegistry;
}

}  // namespace

std::unique_ptr<Clusterer> make_clusterer(const std::string& name) { return registry().make(name); }

std::vector<std::string> clusterer_names() { return registry().names(); }

}  // namespace swarm_kv
