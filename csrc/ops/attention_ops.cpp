#include <algorithm>
#include <optional>
#include <tuple>

#include "ops/cpu/attention.h"
#include "ops/merge_checks.h"
#include "ops/tensors.h"

namespace swarm_kv::ops {
namespace {

constexpr const char* kSparse = "sparse_attention";
constexpr const char* kMerge = "merge_attention";

// Every list must lie inside slots, and every entry inside the pool: the pool is memory that other
// parts own.
void check_lists(const Tensor& slots, const Tensor& row_offsets, int64_t pool_size,
                 int64_t entry_size) {
  const int64_t total = slots.numel();
  const int64_t rows = row_offsets.numel() - 1;
  const int64_t* offsets = data<int64_t>(row_offsets);
  check(offsets[0] == 0 && offsets[rows] == total, kSparse,
        ": row_offsets must run from 0 to slots' length ", total, ", got ", offsets[0], " to ",
        offsets[rows]);
  for (int64_t r = 0; r < rows; ++r) {
    check(offsets[r] <= offsets[r + 1], kSparse, ": row_offsets must not decrease, got ",
          offsets[r], " then ", offsets[r + 1], " at row ", r);
  }
  if (total == 0) return;
  const int64_t* first = data<int64_t>(slots);
  const auto [low, high] = std::minmax_element(first, first + total);
  check(*low >= 0 && *high <= pool_size - entry_size, kSparse, ": slots must be within [0, ",
        pool_size - entry_size, "] (pool of ", pool_size, " elements, entries of ", entry_size,
        "), got values from ", *low, " to ", *high);
}

template <typename T, typename Acc>
void attend(const Tensor& q, const Tensor& pool, const Tensor& slots, const Tensor& row_offsets,
            int64_t kv_heads, double scale, const Tensor* sinks, double softcap, const Tensor& out,
            const Tensor& lse) {
  cpu::SparseAttention<T, Acc> call;
  call.q = data<Acc>(q);
  call.pool = data<T>(pool);
  call.slots = data<int64_t>(slots);
  call.row_offsets = data<int64_t>(row_offsets);
  call.rows = q.size(0);
  call.query_heads = q.size(1);
  call.kv_heads = kv_heads;
  call.dim = q.size(2);
  call.scale = static_cast<Acc>(scale);
  call.sinks = sinks == nullptr ? nullptr : data<Acc>(*sinks);
  call.softcap = static_cast<Acc>(softcap);
  call.out = mutable_data<Acc>(out);
  call.lse = mutable_data<Acc>(lse);
  cpu::sparse_attention(call);
}

std::tuple<Tensor, Tensor> sparse_attention(const Tensor& q, const Tensor& pool,
                                            const Tensor& slots, const Tensor& row_offsets,
                                            int64_t kv_heads, double scale,
                                            const std::optional<Tensor>& sinks,
                                            std::optional<double> softcap) {
  Argument{kSparse, "q", q}.on_cpu().floating().dim(3);
  Argument{kSparse, "pool", pool}.on_cpu().dtype(q.scalar_type()).dim(1);
  Argument{kSparse, "slots", slots}.on_cpu().dtype(ScalarType::Long).dim(1);
  Argument{kSparse, "row_offsets", row_offsets}
      .on_cpu()
      .dtype(ScalarType::Long)
      .dim(1)
      .size(0, q.size(0) + 1, "rows of q + 1");
  check(pool.is_contiguous(), kSparse, ": pool must be contiguous, got stride ", pool.stride(0));
  check(kv_heads >= 1 && q.size(1) % kv_heads == 0, kSparse, ": kv_heads = ", kv_heads,
        " must divide the query heads of q ", describe(q));
  check(!softcap.has_value() || *softcap > 0, kSparse, ": softcap must be positive, got ",
        softcap.value_or(0), "; pass None for no cap");
  if (sinks.has_value()) {
    Argument{kSparse, "sinks", *sinks}.on_cpu().floating().dim(1).size(0, q.size(1), "query heads");
  }
  const Tensor slots_c = as_contiguous(slots);
  const Tensor offsets_c = as_contiguous(row_offsets);
  check_lists(slots_c, offsets_c, pool.numel(), 2 * kv_heads * q.size(2));

  const ScalarType acc = accumulation_dtype(q.scalar_type());
  const Tensor q_c = as_contiguous(q, acc);
  const Tensor sinks_c = sinks.has_value() ? as_contiguous(*sinks, acc) : q_c;
  const Tensor out = empty_cpu({q.size(0), q.size(1), q.size(2)}, acc);
  const Tensor lse = empty_cpu({q.size(0), q.size(1)}, acc);
  const auto run = [&](auto kernel) {
    kernel(q_c, pool, slots_c, offsets_c, kv_heads, scale, sinks.has_value() ? &sinks_c : nullptr,
           softcap.value_or(0), out, lse);
  };
  switch (q.scalar_type()) {
    case ScalarType::Half:
      run(attend<fp16, float>);
      break;
    case ScalarType::BFloat16:
      run(attend<bf16, float>);
      break;
    case ScalarType::Double:
      run(attend<double, double>);
      break;
    default:
      run(attend<float, float>);
  }
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
