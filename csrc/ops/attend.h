#pragma once

#include <span>

#include "ops/tensors.h"

namespace swarm_kv::ops {

// Row r attends to the entries at slots[offsets[r]] .. slots[offsets[r + 1]), element offsets in
// the pool.
struct SlotLists {
  std::span<const int64_t> slots;
  std::span<const int64_t> offsets;
};

// Throws Error(kArgument) unless every list lies inside `slots` and every entry inside a pool of
// `pool_size` elements: it is memory that other parts own.
void check_slots(const char* op, const SlotLists& lists, int64_t pool_size, int64_t entry_size);

// What attention does beyond the scores of its queries.
struct AttendOptions {
  int64_t kv_heads;
  double scale;
  const Tensor* sinks;  // [query heads] of the accumulation dtype, or null
  double softcap;       // 0: none
};

// sparse_attention with checked arguments. q [rows, query heads, dim], out and lse are contiguous
// and of the accumulation dtype of `dtype`, which is that of the pool.
void attend(const Tensor& q, ScalarType dtype, const void* pool, const SlotLists& lists,
            const AttendOptions& options, const Tensor& out, const Tensor& lse);

// Merges the attention b into a, which it replaces; all contiguous, float32 or float64.
void merge_into(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b);

}  // namespace swarm_kv::ops
