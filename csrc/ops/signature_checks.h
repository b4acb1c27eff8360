#pragma once

#include <optional>

#include "ops/tensors.h"

namespace swarm_kv::ops {

constexpr const char* kActivationSignatures = "activation_signatures";

// The shape and dtype checks of activation_signatures, the same in the CPU and the CUDA library.
inline void check_signature_tensors(const Tensor& q, const Tensor& k, const Tensor& q_positions,
                                    const std::optional<Tensor>& lse) {
  const char* op = kActivationSignatures;
  Argument{op, "q", q}.floating().dim(3);
  Argument{op, "k", k}.floating().dim(3).size(2, q.size(2), "features of q");
  Argument{op, "q_positions", q_positions}
      .dtype(ScalarType::Long)
      .dim(1)
      .size(0, q.size(1), "queries");
  if (lse) {
    Argument{op, "lse", *lse}
        .floating()
        .dim(2)
        .size(0, q.size(0), "heads of q")
        .size(1, q.size(1), "queries");
  }
}

}  // namespace swarm_kv::ops
