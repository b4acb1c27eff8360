#pragma once

#include <optional>

#include "ops/tensors.h"

namespace swarm_kv::ops {

inline constexpr const char* kSparseAttention = "sparse_attention";

// The heads of q [rows, query heads, dim], of the KV and of the sinks fit, and the soft cap is
// positive.
inline void check_heads(const char* op, const Tensor& q, int64_t kv_heads,
                        const std::optional<Tensor>& sinks, std::optional<double> softcap) {
  check(kv_heads >= 1 && q.size(1) % kv_heads == 0, op, ": kv_heads = ", kv_heads,
        " must divide the query heads of q ", describe(q));
  check(!softcap.has_value() || *softcap > 0, op, ": softcap must be positive, got ",
        softcap.value_or(0), "; pass None for no cap");
  if (sinks.has_value()) {
    Argument{op, "sinks", *sinks}.floating().dim(1).size(0, q.size(1), "query heads");
  }
}

// The checks of shapes, dtypes and numbers of sparse_attention, the same in the CPU and the CUDA
// library.
inline void check_sparse_arguments(const Tensor& q, const Tensor& pool, const Tensor& slots,
                                   const Tensor& row_offsets, int64_t kv_heads,
                                   const std::optional<Tensor>& sinks,
                                   std::optional<double> softcap) {
  constexpr const char* kOp = kSparseAttention;
  Argument{kOp, "q", q}.floating().dim(3);
  Argument{kOp, "pool", pool}.dtype(q.scalar_type()).dim(1);
  Argument{kOp, "slots", slots}.dtype(ScalarType::Long).dim(1);
  Argument{kOp, "row_offsets", row_offsets}
      .dtype(ScalarType::Long)
      .dim(1)
      .size(0, q.size(0) + 1, "rows of q + 1");
  check(pool.is_contiguous(), kOp, ": pool must be contiguous, got stride ", pool.stride(0));
  check_heads(kOp, q, kv_heads, sinks, softcap);
}

}  // namespace swarm_kv::ops
