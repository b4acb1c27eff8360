#include <optional>
#include <string>

#include "core/signature.h"
#include "ops/tensors.h"

namespace swarm_kv::ops {
namespace {

constexpr const char* kOp = "activation_signatures";

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
  Argument{kOp, "q", q}.on_cpu().floating().dim(3);
  Argument{kOp, "k", k}.on_cpu().floating().dim(3).size(2, q.size(2), "features of q");
  Argument{kOp, "q_positions", q_positions}
      .on_cpu()
      .dtype(ScalarType::Long)
      .dim(1)
      .size(0, q.size(1), "queries");
  std::optional<Tensor> lse_c;
  if (lse) {
    Argument{kOp, "lse", *lse}
        .on_cpu()
        .floating()
        .dim(2)
        .size(0, q.size(0), "heads of q")
        .size(1, q.size(1), "queries");
    lse_c = as_contiguous(*lse, ScalarType::Float);
  }
  const Tensor positions = as_contiguous(q_positions);
  SignatureOptions options;
  options.sparsity = sparsity;
  options.window = window;
  options.sinks = sinks;
  options.scale = scale;
  options.heads = head_aggregation(heads);
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
