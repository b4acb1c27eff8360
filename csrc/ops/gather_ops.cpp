#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>
#include <memory>
#include <span>

#include "core/codec.h"
#include "ops/gather_checks.h"

namespace swarm_kv::ops {
namespace {

constexpr int64_t kGrain = 64;  // entries per task: a few hundred KiB

// Entries of the pool side by side: the exact passes hand them to dense kernels.
Tensor gather_entries(Tensor pool, Tensor slots, int64_t entry_elements) {
  check_on_cpu(kGatherEntries, {{"pool", pool}, {"slots", slots}});
  check_gather_arguments(pool, slots, entry_elements);
  const Tensor list = as_contiguous(slots);
  const int64_t* offsets = data<int64_t>(list);
  const int64_t count = list.numel();
  check_slots(kGatherEntries, list, pool.numel() - entry_elements);
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

// The same of entries that are written in a codec, as they were before but for its rounding.
Tensor decode_entries(Tensor codes, Tensor slots, std::string codec, int64_t kv_heads,
                      int64_t head_dim, ScalarType dtype, std::optional<Tensor> channels) {
  check_on_cpu(kDecodeEntries, {{"codes", codes}, {"slots", slots}});
  if (channels) check_on_cpu(kDecodeEntries, {{"channels", *channels}});
  check_decode_arguments(codes, slots, codec, kv_heads, head_dim, dtype, channels);
  std::span<const float> learned;
  if (channels) {
    channels = as_contiguous(*channels);
    learned = {data<float>(*channels), static_cast<size_t>(channels->numel())};
  }
  const std::unique_ptr<const Codec> decoder =
      make_codec(codec, element_of(dtype), kv_heads, head_dim, learned);
  const Tensor list = as_contiguous(slots);
  check_slots(kDecodeEntries, list, codes.numel() - decoder->stored_bytes());
  const Tensor out = empty_cpu({list.numel(), 2 * kv_heads * head_dim}, dtype);
  const int64_t bytes = out.size(1) * static_cast<int64_t>(out.element_size());
  const int64_t* offsets = data<int64_t>(list);
  const std::byte* source = data<std::byte>(codes);
  std::byte* target = mutable_data<std::byte>(out);
  torch::stable::parallel_for(0, list.numel(), kGrain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) decoder->decode(source + offsets[i], target + i * bytes);
  });
  return out;
}

}  // namespace
}  // namespace swarm_kv::ops

STABLE_TORCH_LIBRARY_FRAGMENT(swarm_kv, m) {
  m.def("gather_entries(Tensor pool, Tensor slots, int entry_elements) -> Tensor");
  m.def(
      "decode_entries(Tensor codes, Tensor slots, str codec, int kv_heads, int head_dim, "
      "ScalarType dtype, Tensor? channels=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CPU, m) {
  m.impl("gather_entries", SWARM_KV_BOX(swarm_kv::ops::gather_entries));
  m.impl("decode_entries", SWARM_KV_BOX(swarm_kv::ops::decode_entries));
}
