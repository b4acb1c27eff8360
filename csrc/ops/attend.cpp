#include "ops/attend.h"

#include <algorithm>

#include "ops/cpu/attention.h"

namespace swarm_kv::ops {
namespace {

template <typename T, typename Acc>
void attend_as(const Tensor& q, const void* pool, const SlotLists& lists,
               const AttendOptions& options, const Tensor& out, const Tensor& lse) {
  cpu::SparseAttention<T, Acc> call;
  call.q = data<Acc>(q);
  call.pool = static_cast<const T*>(pool);
  call.slots = lists.slots.data();
  call.row_offsets = lists.offsets.data();
  call.rows = q.size(0);
  call.query_heads = q.size(1);
  call.kv_heads = options.kv_heads;
  call.dim = q.size(2);
  call.scale = static_cast<Acc>(options.scale);
  call.sinks = options.sinks == nullptr ? nullptr : data<Acc>(*options.sinks);
  call.softcap = static_cast<Acc>(options.softcap);
  call.out = mutable_data<Acc>(out);
  call.lse = mutable_data<Acc>(lse);
  cpu::sparse_attention(call);
}

template <typename Acc>
void merge_as(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b) {
  cpu::merge_attention(data<Acc>(out_a), data<Acc>(lse_a), data<Acc>(out_b), data<Acc>(lse_b),
                       lse_a.numel(), out_a.size(out_a.dim() - 1), mutable_data<Acc>(out_a),
                       mutable_data<Acc>(lse_a));
}

}  // namespace

void check_slots(const char* op, const SlotLists& lists, int64_t pool_size, int64_t entry_size) {
  const auto total = static_cast<int64_t>(lists.slots.size());
  const auto& offsets = lists.offsets;
  check(offsets.front() == 0 && offsets.back() == total, op,
        ": row_offsets must run from 0 to slots' length ", total, ", got ", offsets.front(), " to ",
        offsets.back());
  for (size_t r = 0; r + 1 < offsets.size(); ++r) {
    check(offsets[r] <= offsets[r + 1], op, ": row_offsets must not decrease, got ", offsets[r],
          " then ", offsets[r + 1], " at row ", r);
  }
  if (total == 0) return;
  const auto [low, high] = std::ranges::minmax(lists.slots);
  check(low >= 0 && high <= pool_size - entry_size, op, ": slots must be within [0, ",
        pool_size - entry_size, "] (pool of ", pool_size, " elements, entries of ", entry_size,
        "), got values from ", low, " to ", high);
}

void attend(const Tensor& q, ScalarType dtype, const void* pool, const SlotLists& lists,
            const AttendOptions& options, const Tensor& out, const Tensor& lse) {
  switch (dtype) {
    case ScalarType::Half:
      return attend_as<fp16, float>(q, pool, lists, options, out, lse);
    case ScalarType::BFloat16:
      return attend_as<bf16, float>(q, pool, lists, options, out, lse);
    case ScalarType::Double:
      return attend_as<double, double>(q, pool, lists, options, out, lse);
    default:
      return attend_as<float, float>(q, pool, lists, options, out, lse);
  }
}

void merge_into(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                const Tensor& lse_b) {
  if (out_a.scalar_type() == ScalarType::Double) {
    merge_as<double>(out_a, lse_a, out_b, lse_b);
  } else {
    merge_as<float>(out_a, lse_a, out_b, lse_b);
  }
}

}  // namespace swarm_kv::ops
