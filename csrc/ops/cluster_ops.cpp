#include <tuple>

#include "core/clustering.h"
#include "ops/tensors.h"

namespace swarm_kv::ops {
namespace {

std::tuple<Tensor, Tensor> cluster(const Tensor& bits, double tau, int64_t max_size,
                                   int64_t max_replicas, int64_t min_activation) {
  Argument{"cluster", "bits", bits}.on_cpu().dtype(ScalarType::Long).dim(2);
  const Tensor bits_c = as_contiguous(bits);
  ClusterOptions options;
  options.tau = tau;
  options.max_size = max_size;
  options.max_replicas = max_replicas;
  options.min_activation = min_activation;
  const Clusters clusters =
      cluster_signatures(data<int64_t>(bits_c), bits.size(0), bits.size(1), options);
  return {int64_tensor(clusters.offsets), int64_tensor(clusters.members)};
}

}  // namespace
}  // namespace swarm_kv::ops

STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CPU, m) {
  m.impl("cluster", SWARM_KV_BOX(swarm_kv::ops::cluster));
}
