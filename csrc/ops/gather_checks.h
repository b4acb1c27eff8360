#pragma once

#include "ops/tensors.h"

namespace swarm_kv::ops {

inline constexpr const char* kGatherEntries = "gather_entries";

// The checks of shapes and dtypes of gather_entries, the same in the CPU and the CUDA library.
inline void check_gather_arguments(const Tensor& pool, const Tensor& slots,
                                   int64_t entry_elements) {
  Argument{kGatherEntries, "pool", pool}.dim(1).floating();
  Argument{kGatherEntries, "slots", slots}.dim(1).dtype(ScalarType::Long);
  check(pool.is_contiguous(), kGatherEntries, ": `pool` must be contiguous");
  check(entry_elements > 0, kGatherEntries, ": `entry_elements` must be positive, got ",
        entry_elements);
}

}  // namespace swarm_kv::ops
