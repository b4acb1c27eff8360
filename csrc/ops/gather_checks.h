#pragma once

#include <optional>
#include <string>

#include "ops/tensors.h"

// The checks of shapes and dtypes of what brings entries out of memory, the same in the CPU and the
// CUDA library.
namespace swarm_kv::ops {

inline constexpr const char* kGatherEntries = "gather_entries";
inline constexpr const char* kDecodeEntries = "decode_entries";

inline void check_gather_arguments(const Tensor& pool, const Tensor& slots,
                                   int64_t entry_elements) {
  Argument{kGatherEntries, "pool", pool}.dim(1).floating();
  Argument{kGatherEntries, "slots", slots}.dim(1).dtype(ScalarType::Long);
  check(pool.is_contiguous(), kGatherEntries, ": `pool` must be contiguous");
  check(entry_elements > 0, kGatherEntries, ": `entry_elements` must be positive, got ",
        entry_elements);
}

// Throws for a slot outside [0, last]. On a CUDA device the kernel looks at them instead.
inline void check_slots(const char* op, const Tensor& slots, int64_t last) {
  const int64_t* const slot = data<int64_t>(slots);
  for (int64_t i = 0; i < slots.numel(); ++i) {
    check(slot[i] >= 0 && slot[i] <= last, op, ": slot ", slot[i], " is outside [0, ", last, "]");
  }
}

// A codec of core/codec.h that makes codes of entries, and that kernels decode.
inline void check_codec(const char* op, const std::string& codec) {
  check(codec != "none", op,
        ": `codec` \"none\" leaves entries as they are; gather_entries copies such");
  check(codec == "int8" || codec == "kivi4", op, ": unknown `codec` \"", codec,
        "\"; choose one of: int8, kivi4");
}

inline void check_decode_arguments(const Tensor& codes, const Tensor& slots,
                                   const std::string& codec, int64_t kv_heads, int64_t head_dim,
                                   ScalarType dtype, const std::optional<Tensor>& channels) {
  constexpr int64_t kMostNumbers = 1 << 20;  // of K; far above what models have
  Argument{kDecodeEntries, "codes", codes}.dim(1).dtype(ScalarType::Byte);
  Argument{kDecodeEntries, "slots", slots}.dim(1).dtype(ScalarType::Long);
  check(codes.is_contiguous(), kDecodeEntries, ": `codes` must be contiguous");
  check_codec(kDecodeEntries, codec);
  check(kv_heads > 0 && head_dim > 0 && kv_heads <= kMostNumbers / head_dim, kDecodeEntries,
        ": `kv_heads` and `head_dim` must be positive and their product at most ", kMostNumbers,
        ", got ", kv_heads, " and ", head_dim);
  check(is_floating(dtype) && dtype != ScalarType::Double, kDecodeEntries,
        ": `dtype` must be float16, bfloat16 or float32, got ", dtype_name(dtype),
        "; codes hold no more than float32");
  if (codec == "kivi4") {
    check(channels.has_value(), kDecodeEntries,
          ": `codec` \"kivi4\" needs the `channels` that encode_entries returned with the codes");
    Argument{kDecodeEntries, "channels", *channels}
        .dim(3)
        .dtype(ScalarType::Float)
        .size(0, 2, "means and deviations")
        .size(1, kv_heads, "kv_heads")
        .size(2, head_dim, "head_dim");
  } else if (channels) {
    check(channels->numel() == 0, kDecodeEntries, ": `codec` \"", codec,
          "\" takes no `channels`, got ", describe(*channels));
  }
}

}  // namespace swarm_kv::ops
