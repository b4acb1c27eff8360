#include "ops/cuda/gather.h"
#include "ops/cuda/gpu_call.h"
#include "ops/gather_checks.h"

namespace swarm_kv::ops {
namespace {

// A source as the device of the call sees it: its own memory, or pinned memory of the host.
const void* on_device(const char* op, const GpuCall& call, const Named& source,
                      const Tensor& slots) {
  if (source.tensor.is_cuda()) {
    check_on_one_gpu(op, {{"slots", slots}, source});
    return source.tensor.const_data_ptr();
  }
  if (source.tensor.numel() == 0) return nullptr;
  cudaPointerAttributes attributes{};
  call.check(cudaPointerGetAttributes(&attributes, source.tensor.const_data_ptr()));
  check(attributes.type == cudaMemoryTypeHost && attributes.devicePointer != nullptr, op, ": `",
        source.name, "` must be on the CUDA device of `slots` or in pinned memory, got ",
        describe(source.tensor), "; move it with .cuda() or .pin_memory()");
  return attributes.devicePointer;
}

Tensor gather_entries(Tensor pool, Tensor slots, int64_t entry_elements) {
  check_on_one_gpu(kGatherEntries, {{"slots", slots}});
  check_gather_arguments(pool, slots, entry_elements);
  const GpuCall call(kGatherEntries, slots);
  const Tensor list = as_contiguous(slots);
  const int64_t item = static_cast<int64_t>(pool.element_size());
  const Tensor out = call.empty({list.numel(), entry_elements}, pool.scalar_type());
  const int64_t bytes = entry_elements * item;
  const cuda::Entries entries{on_device(kGatherEntries, call, {"pool", pool}, slots),
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

Tensor decode_entries(Tensor codes, Tensor slots, std::string codec, int64_t kv_heads,
                      int64_t head_dim, ScalarType dtype, std::optional<Tensor> channels) {
  check_on_one_gpu(kDecodeEntries, {{"slots", slots}});
  if (channels) check_on_one_gpu(kDecodeEntries, {{"slots", slots}, {"channels", *channels}});
  check_decode_arguments(codes, slots, codec, kv_heads, head_dim, dtype, channels);
  const GpuCall call(kDecodeEntries, slots);
  const Tensor list = as_contiguous(slots);
  if (channels) channels = as_contiguous(*channels);
  using Code = cuda::Coding::Code;
  const cuda::Coding coding{codec == "int8" ? Code::kInt8 : Code::kKivi4, kv_heads, head_dim,
                            element_of(dtype), channels ? data<float>(*channels) : nullptr};
  const int64_t bytes = cuda::code_bytes(coding);
  check(bytes <= cuda::kMaxCodeBytes, kDecodeEntries, ": an entry's code on a CUDA device must ",
        "have at most ", cuda::kMaxCodeBytes, " bytes, got ", bytes, "; decode it on the CPU");
  const Tensor out = call.empty({list.numel(), 2 * kv_heads * head_dim}, dtype);
  const cuda::Entries entries{on_device(kDecodeEntries, call, {"codes", codes}, slots),
                              codes.numel(),
                              data<int64_t>(list),
                              out.mutable_data_ptr(),
                              out.numel() * static_cast<int64_t>(out.element_size()),
                              nullptr,
                              list.numel(),
                              1};
  call.check(cuda::decode_entries(entries, coding, call.stream()));
  return out;
}

}  // namespace
}  // namespace swarm_kv::ops

STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CUDA, m) {
  m.impl("gather_entries", SWARM_KV_BOX(swarm_kv::ops::gather_entries));
  m.impl("decode_entries", SWARM_KV_BOX(swarm_kv::ops::decode_entries));
}
