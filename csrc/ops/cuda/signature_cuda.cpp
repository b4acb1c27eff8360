#include <optional>
#include <string>

#include "ops/cuda/gpu_call.h"
#include "ops/cuda/signature.h"
#include "ops/signature_checks.h"

namespace swarm_kv::ops {
namespace {

Tensor activation_signatures(const Tensor& q, const Tensor& k, const Tensor& q_positions,
                             double sparsity, int64_t window, int64_t sinks, double scale,
                             std::optional<Tensor> lse, std::string heads) {
  const char* op = kActivationSignatures;
  check_on_one_gpu(op, {{"q", q}, {"k", k}, {"q_positions", q_positions}});
  if (lse) check_on_one_gpu(op, {{"q", q}, {"lse", *lse}});
  check_signature_tensors(q, k, q_positions, lse);
  const SignatureOptions options{.sparsity = sparsity,
                                 .window = window,
                                 .sinks = sinks,
                                 .scale = scale,
                                 .heads = head_aggregation(heads)};
  check_signature_sizes({q.size(0), q.size(1), q.size(2), k.size(0), k.size(1), k.size(2)},
                        options);
  const GpuCall call(op, q);
  call.refuse_capture();
  const Tensor q_c = as_contiguous(q, ScalarType::Float);
  // Copied only if its features are not contiguous, or float64.
  const Tensor floats = as_device_floats(k);
  const Tensor keys = floats.stride(2) == 1 || floats.size(2) == 1 ? floats : as_contiguous(floats);
  const Tensor positions = as_contiguous(q_positions);
  std::optional<Tensor> lse_c;
  if (lse) lse_c = as_contiguous(*lse, ScalarType::Float);

  const cuda::SignatureQueries queries{data<float>(q_c),
                                       q.size(0),
                                       q.size(1),
                                       q.size(2),
                                       data<int64_t>(positions),
                                       lse_c ? data<float>(*lse_c) : nullptr};
  const cuda::SignatureKeys rows{{keys.const_data_ptr(), element_of(keys.scalar_type())},
                                 k.size(0),
                                 k.size(1),
                                 keys.stride(0),
                                 keys.stride(1)};
  const Tensor found = call.bytes(sizeof(cuda::SignatureExtremes));
  call.check(cuda::signature_extremes(
      queries, rows, static_cast<cuda::SignatureExtremes*>(found.mutable_data_ptr()),
      call.stream()));
  const auto extremes = call.read<cuda::SignatureExtremes>(found);
  check(extremes.positions >= 0, op, ": q_positions must be at least 0, got a negative one");
  check_signature_values(extremes.q, extremes.k, extremes.lse, q.size(2), scale);

  const Tensor bits = call.empty({k.size(1), (q.size(1) + 63) / 64}, ScalarType::Long);
  const Tensor scratch = call.bytes(cuda::signature_scratch(queries, rows));
  call.check(cuda::activation_signatures(queries, rows, options, mutable_data<int64_t>(bits),
                                         scratch.mutable_data_ptr(), call.stream()));
  return bits;
}

}  // namespace
}  // namespace swarm_kv::ops

STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CUDA, m) {
  m.impl("activation_signatures", SWARM_KV_BOX(swarm_kv::ops::activation_signatures));
}
