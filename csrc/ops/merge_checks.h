#pragma once

#include "ops/tensors.h"

namespace swarm_kv::ops {

// The shape, dtype and device checks of merge_attention, the same in the CPU and the CUDA library.
inline void check_merge_arguments(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                  const Tensor& lse_b) {
  constexpr const char* kOp = "merge_attention";
  const ScalarType dtype = out_a.scalar_type();
  check(dtype == ScalarType::Float || dtype == ScalarType::Double, kOp,
        ": out_a must be float32 or float64, got ", describe(out_a));
  const int64_t dims = out_a.dim();
  check(dims >= 1, kOp, ": out_a must have at least 1 dimension, got ", describe(out_a));
  const struct {
    const char* name;
    const Tensor& tensor;
    int64_t dims;
  } others[] = {{"lse_a", lse_a, dims - 1}, {"out_b", out_b, dims}, {"lse_b", lse_b, dims - 1}};
  for (const auto& other : others) {
    bool same = other.tensor.scalar_type() == dtype && other.tensor.dim() == other.dims &&
                other.tensor.is_cuda() == out_a.is_cuda() &&
                other.tensor.get_device_index() == out_a.get_device_index();
    for (int64_t i = 0; same && i < other.dims; ++i) same = other.tensor.size(i) == out_a.size(i);
    check(same, kOp, ": ", other.name, " must match out_a ", describe(out_a),
          other.dims == dims ? "" : " without its last dimension",
          " in shape, dtype and device, got ", describe(other.tensor));
  }
}

}  // namespace swarm_kv::ops
