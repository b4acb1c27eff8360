#include <string>
#include <tuple>
#include <utility>

#include "core/clusterer.h"
#include "ops/tensors.h"

namespace swarm_kv::ops {
namespace {

std::tuple<Tensor, Tensor> cluster(const Tensor& bits, std::string clusterer, std::string distance,
                                   double tau, int64_t max_size, int64_t max_replicas,
                                   int64_t min_activation, std::string cold, int64_t block,
                                   int64_t max_index_bytes, int64_t seed) {
  Argument{"cluster", "bits", bits}.on_cpu().dtype(ScalarType::Long).dim(2);
  const Tensor bits_c = as_contiguous(bits);
  ClusterOptions options;
  options.distance = std::move(distance);
  options.tau = tau;
  options.max_size = max_size;
  options.max_replicas = max_replicas;
  options.min_activation = min_activation;
  options.cold = std::move(cold);
  options.block = block;
  options.max_index_bytes = max_index_bytes;
  options.seed = static_cast<uint64_t>(seed);
  const Clusters clusters = make_clusterer(clusterer)->cluster(data<int64_t>(bits_c), bits.size(0),
                                                               bits.size(1), options);
  return {int32_tensor(clusters.offsets), int32_tensor(clusters.members)};
}

}  // namespace
}  // namespace swarm_kv::ops

STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CPU, m) {
  m.impl("cluster", SWARM_KV_BOX(swarm_kv::ops::cluster));
}
