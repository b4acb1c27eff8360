#pragma once

#include <cstdint>
#include <span>

#include "ops/tensors.h"

namespace swarm_kv::ops {

inline Tensor list_of(const char* op, const char* name, const Tensor& tensor, ScalarType dtype) {
  Argument{op, name, tensor}.on_cpu().dim(1).dtype(dtype);
  return as_contiguous(tensor);
}

inline std::vector<int32_t> int32_list(const char* op, const char* name, const Tensor& tensor) {
  const Tensor list = list_of(op, name, tensor, ScalarType::Int);
  return {data<int32_t>(list), data<int32_t>(list) + list.numel()};
}

// Row t of a ragged list of int64: values[rows[t] .. rows[t + 1]).
struct Ragged {
  Tensor values;
  Tensor rows;

  Ragged(const char* op, const char* name, const Tensor& v, const char* rows_name, const Tensor& r)
      : values(list_of(op, name, v, ScalarType::Long)),
        rows(list_of(op, rows_name, r, ScalarType::Long)) {
    const int64_t* bounds = data<int64_t>(rows);
    check(rows.numel() > 0 && bounds[0] == 0 && bounds[count()] == values.numel(), op, ": `",
          rows_name, "` must run from 0 to the length of `", name, "`, ", values.numel());
    for (int64_t t = 0; t < count(); ++t) {
      check(bounds[t] <= bounds[t + 1], op, ": `", rows_name, "` must ascend, but ", bounds[t],
            " is followed by ", bounds[t + 1]);
    }
  }

  int64_t count() const { return rows.numel() - 1; }
  std::span<const int64_t> row(int64_t t) const {
    const int64_t* bounds = data<int64_t>(rows);
    return {data<int64_t>(values) + bounds[t], static_cast<size_t>(bounds[t + 1] - bounds[t])};
  }
};

}  // namespace swarm_kv::ops
