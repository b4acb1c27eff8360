#include "core/signature.h"
#include "ops/tensors.h"

namespace swarm_kv::ops {
namespace {

constexpr const char* kOp = "activation_signatures";

Tensor activation_signatures(const Tensor& q, const Tensor& k, const Tensor& q_positions,
                             double sparsity, int64_t window, int64_t sinks, double scale) {
  Argument{kOp, "q", q}.on_cpu().floating().dim(3);
  Argument{kOp, "k", k}.on_cpu().floating().dim(3).size(2, q.size(2), "features of q");
  Argument{kOp, "q_positions", q_positions}
      .on_cpu()
      .dtype(ScalarType::Long)
      .dim(1)
      .size(0, q.size(1), "queries");
  const Tensor q_c = as_contiguous(q, ScalarType::Float);
  const Tensor k_c = as_contiguous(k, ScalarType::Float);
  const Tensor positions = as_contiguous(q_positions);
  SignatureOptions options;
  options.sparsity = sparsity;
  options.window = window;
  options.sinks = sinks;
  options.scale = scale;
  const Tensor bits = empty_cpu({k.size(1), (q.size(1) + 63) / 64}, ScalarType::Long);
  swarm_kv::activation_signatures(data<float>(q_c), q.size(0), q.size(1), data<float>(k_c),
                                  k.size(0), k.size(1), q.size(2), data<int64_t>(positions),
                                  options, mutable_data<int64_t>(bits));
  return bits;
}

}  // namespace
}  // namespace swarm_kv::ops

STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CPU, m) {
  m.impl("activation_signatures", SWARM_KV_BOX(swarm_kv::ops::activation_signatures));
}
