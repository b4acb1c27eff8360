#include <string>
#include <tuple>
#include <utility>

#include "core/maintain.h"
#include "ops/tensors.h"

namespace swarm_kv::ops {
namespace {

std::tuple<Tensor, Tensor> join(const Tensor& bits, const Tensor& medoid_bits, int64_t steps,
                                std::string distance, double tau, int64_t max_replicas) {
  constexpr const char* kOp = "join_clusters";
  Argument{kOp, "bits", bits}.on_cpu().dtype(ScalarType::Long).dim(2);
  Argument{kOp, "medoid_bits", medoid_bits}
      .on_cpu()
      .dtype(ScalarType::Long)
      .dim(2)
      .size(1, bits.size(1), "words");
  const Tensor bits_c = as_contiguous(bits), medoids_c = as_contiguous(medoid_bits);
  const Homes homes = join_clusters(
      data<int64_t>(bits_c), bits.size(0), data<int64_t>(medoids_c), medoid_bits.size(0),
      bits.size(1),
      {.distance = std::move(distance), .tau = tau, .steps = steps, .max_replicas = max_replicas});
  return {int64_tensor(homes.rows), int64_tensor(homes.homes)};
}

}  // namespace
}  // namespace swarm_kv::ops

STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CPU, m) {
  m.impl("join_clusters", SWARM_KV_BOX(swarm_kv::ops::join));
}
