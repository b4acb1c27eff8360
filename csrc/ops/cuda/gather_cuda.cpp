#include "ops/cuda/gather.h"
#include "ops/cuda/gpu_call.h"
#include "ops/gather_checks.h"

namespace swarm_kv::ops {
namespace {

constexpr const char* kOp = kGatherEntries;

// The pool as the device of the call sees it: its own memory, or pinned memory of the host.
const void* on_device(const GpuCall& call, const Tensor& pool, const Tensor& slots) {
  if (pool.is_cuda()) {
    check_on_one_gpu(kOp, {{"slots", slots}, {"pool", pool}});
    return pool.const_data_ptr();
  }
  if (pool.numel() == 0) return nullptr;
  cudaPointerAttributes attributes{};
  call.check(cudaPointerGetAttributes(&attributes, pool.const_data_ptr()));
  check(attributes.type == cudaMemoryTypeHost && attributes.devicePointer != nullptr, kOp,
        ": `pool` must be on the CUDA device of `slots` or in pinned memory, got ", describe(pool),
        "; move it with .cuda() or .pin_memory()");
  return attributes.devicePointer;
}

Tensor gather_entries(Tensor pool, Tensor slots, int64_t entry_elements) {
  check_on_one_gpu(kOp, {{"slots", slots}});
  check_gather_arguments(pool, slots, entry_elements);
  const GpuCall call(kOp, slots);
  const Tensor list = as_contiguous(slots);
  const int64_t item = static_cast<int64_t>(pool.element_size());
  const Tensor out = call.empty({list.numel(), entry_elements}, pool.scalar_type());
  const int64_t bytes = entry_elements * item;
  const cuda::Entries entries{on_device(call, pool, slots),
                              pool.numel() * item,
                              data<int64_t>(list),
                              out.mutable_data_ptr(),
                              list.numel() * bytes,
                              nullptr,
                              list.numel(),
                              item};
  call.check(cuda::gather_entries(entries, bytes, call.stream()));
  return out;
}

}  // namespace
}  // namespace swarm_kv::ops

STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CUDA, m) {
  m.impl("gather_entries", SWARM_KV_BOX(swarm_kv::ops::gather_entries));
}
