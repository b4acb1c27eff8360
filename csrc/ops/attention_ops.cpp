#include <optional>
#include <tuple>

#include "ops/attend.h"
#include "ops/attention_checks.h"
#include "ops/cpu/attention.h"
#include "ops/merge_checks.h"
#include "ops/tensors.h"

namespace swarm_kv::ops {
namespace {

constexpr const char* kMerge = "merge_attention";

std::tuple<Tensor, Tensor> sparse_attention(const Tensor& q, const Tensor& pool,
                                            const Tensor& slots, const Tensor& row_offsets,
                                            int64_t kv_heads, double scale,
                                            const std::optional<Tensor>& sinks,
                                            std::optional<double> softcap) {
  check_on_cpu(kSparseAttention,
               {{"q", q}, {"pool", pool}, {"slots", slots}, {"row_offsets", row_offsets}});
  if (sinks.has_value()) check_on_cpu(kSparseAttention, {{"sinks", *sinks}});
  check_sparse_arguments(q, pool, slots, row_offsets, kv_heads, sinks, softcap);
  const Tensor slots_c = as_contiguous(slots);
  const Tensor offsets_c = as_contiguous(row_offsets);
  const SlotLists lists{{data<int64_t>(slots_c), static_cast<size_t>(slots_c.numel())},
                        {data<int64_t>(offsets_c), static_cast<size_t>(offsets_c.numel())}};
  check_slots(kSparseAttention, lists, pool.numel(), 2 * kv_heads * q.size(2));

  const ScalarType acc = accumulation_dtype(q.scalar_type());
  const Tensor q_c = as_contiguous(q, acc);
  const Tensor sinks_c = sinks.has_value() ? as_contiguous(*sinks, acc) : q_c;
  const Tensor out = empty_cpu({q.size(0), q.size(1), q.size(2)}, acc);
  const Tensor lse = empty_cpu({q.size(0), q.size(1)}, acc);
  const AttendOptions options{kv_heads, scale, sinks.has_value() ? &sinks_c : nullptr,
                              softcap.value_or(0)};
  attend(q_c, q.scalar_type(), pool.const_data_ptr(), lists, options, out, lse);
  return {out, lse};
}

std::tuple<Tensor, Tensor> merge_attention(const Tensor& out_a, const Tensor& lse_a,
                                           const Tensor& out_b, const Tensor& lse_b) {
  Argument{kMerge, "out_a", out_a}.on_cpu();
  check_merge_arguments(out_a, lse_a, out_b, lse_b);
  const ScalarType dtype = out_a.scalar_type();
  const Tensor a = as_contiguous(out_a), a_lse = as_contiguous(lse_a);
  const Tensor b = as_contiguous(out_b), b_lse = as_contiguous(lse_b);
  const Tensor out = torch::stable::empty_like(a);
  const Tensor lse = torch::stable::empty_like(a_lse);
  const int64_t rows = a_lse.numel();
  const int64_t dim = out_a.size(out_a.dim() - 1);
  if (dtype == ScalarType::Double) {
    cpu::merge_attention(data<double>(a), data<double>(a_lse), data<double>(b), data<double>(b_lse),
                         rows, dim, mutable_data<double>(out), mutable_data<double>(lse));
  } else {
    cpu::merge_attention(data<float>(a), data<float>(a_lse), data<float>(b), data<float>(b_lse),
                         rows, dim, mutable_data<float>(out), mutable_data<float>(lse));
  }
  return {out, lse};
}

}  // namespace
}  // namespace swarm_kv::ops

STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CPU, m) {
  m.impl("sparse_attention", SWARM_KV_BOX(swarm_kv::ops::sparse_attention));
  m.impl("merge_attention", SWARM_KV_BOX(swarm_kv::ops::merge_attention));
}
