#include <optional>
#include <string>

#include "core/signature.h"
#include "ops/signature_checks.h"

namespace swarm_kv::ops {
namespace {

constexpr const char* kOp = kActivationSignatures;

// A tensor [heads, rows, dim] read where it is; copied only if its features are not contiguous.
class View {
 public:
  explicit View(const Tensor& tensor)
      : tensor_(tensor.stride(2) == 1 || tensor.size(2) == 1 ? tensor : as_contiguous(tensor)) {}

  HeadRows rows() const {
    HeadRows rows;
    switch (tensor_.scalar_type()) {
      case ScalarType::Half:
        rows.data = data<fp16>(tensor_);
        break;
      case ScalarType::BFloat16:
        rows.data = data<bf16>(tensor_);
        break;
      case ScalarType::Double:
        rows.data = data<double>(tensor_);
        break;
      default:
        rows.data = data<float>(tensor_);
    }
    rows.heads = tensor_.size(0);
    rows.rows = tensor_.size(1);
    rows.dim = tensor_.size(2);
    rows.head_stride = tensor_.stride(0);
    rows.row_stride = tensor_.stride(1);
    return rows;
  }

 private:
  const Tensor tensor_;
};

Tensor activation_signatures(const Tensor& q, const Tensor& k, const Tensor& q_positions,
                             double sparsity, int64_t window, int64_t sinks, double scale,
                             std::optional<Tensor> lse, std::string heads) {
  check_on_cpu(kOp, {{"q", q}, {"k", k}, {"q_positions", q_positions}});
  check_signature_tensors(q, k, q_positions, lse);
  std::optional<Tensor> lse_c;
  if (lse) {
    check_on_cpu(kOp, {{"lse", *lse}});
    lse_c = as_contiguous(*lse, ScalarType::Float);
  }
  const Tensor positions = as_contiguous(q_positions);
  const SignatureOptions options{.sparsity = sparsity,
                                 .window = window,
                                 .sinks = sinks,
                                 .scale = scale,
                                 .heads = head_aggregation(heads)};
  const View queries(q);
  const View keys(k);
  const Tensor bits = empty_cpu({k.size(1), (q.size(1) + 63) / 64}, ScalarType::Long);
  swarm_kv::activation_signatures(queries.rows(), keys.rows(), data<int64_t>(positions),
                                  lse_c ? data<float>(*lse_c) : nullptr, options,
                                  mutable_data<int64_t>(bits));
  return bits;
}

}  // namespace
}  // namespace swarm_kv::ops

STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CPU, m) {
  m.impl("activation_signatures", SWARM_KV_BOX(swarm_kv::ops::activation_signatures));
}
