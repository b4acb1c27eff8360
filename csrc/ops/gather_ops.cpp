#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "ops/gather_checks.h"

namespace swarm_kv::ops {
namespace {

constexpr const char* kOp = kGatherEntries;
constexpr int64_t kGrain = 64;  // entries per task: a few hundred KiB

// Entries of the pool side by side: the exact passes hand them to dense kernels.
Tensor gather_entries(Tensor pool, Tensor slots, int64_t entry_elements) {
  check_on_cpu(kOp, {{"pool", pool}, {"slots", slots}});
  check_gather_arguments(pool, slots, entry_elements);
  const Tensor list = as_contiguous(slots);
  const int64_t* offsets = data<int64_t>(list);
  const int64_t count = list.numel();
  for (int64_t i = 0; i < count; ++i) {
    check(offsets[i] >= 0 && offsets[i] <= pool.numel() - entry_elements, kOp, ": slot ",
          offsets[i], " is outside [0, ", pool.numel() - entry_elements, "]");
  }
  const Tensor out = empty_cpu({count, entry_elements}, pool.scalar_type());
  const int64_t item = static_cast<int64_t>(pool.element_size());
  const auto* source = static_cast<const std::byte*>(pool.const_data_ptr());
  auto* target = static_cast<std::byte*>(out.mutable_data_ptr());
  torch::stable::parallel_for(0, count, kGrain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      std::memcpy(target + i * entry_elements * item, source + offsets[i] * item,
                  entry_elements * item);
    }
  });
  return out;
}

}  // namespace
}  // namespace swarm_kv::ops

STABLE_TORCH_LIBRARY_FRAGMENT(swarm_kv, m) {
  m.def("gather_entries(Tensor pool, Tensor slots, int entry_elements) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CPU, m) {
  m.impl("gather_entries", SWARM_KV_BOX(swarm_kv::ops::gather_entries));
}
