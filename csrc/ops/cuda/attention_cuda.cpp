#include <tuple>

#include "ops/attention_checks.h"
#include "ops/cuda/attention.h"
#include "ops/cuda/gpu_call.h"

namespace swarm_kv::ops {
namespace {

std::tuple<Tensor, Tensor> sparse_attention(const Tensor& q, const Tensor& pool,
                                            const Tensor& slots, const Tensor& row_offsets,
                                            int64_t kv_heads, double scale,
                                            const std::optional<Tensor>& sinks,
                                            std::optional<double> softcap) {
  constexpr const char* kOp = kSparseAttention;
  check_on_one_gpu(kOp, {{"q", q}, {"pool", pool}, {"slots", slots}, {"row_offsets", row_offsets}});
  if (sinks.has_value()) check_on_one_gpu(kOp, {{"q", q}, {"sinks", *sinks}});
  check_sparse_arguments(q, pool, slots, row_offsets, kv_heads, sinks, softcap);
  check(q.scalar_type() != ScalarType::Double, kOp, ": q on a CUDA device must be float16, ",
        "bfloat16 or float32, got ", describe(q), "; move it with .cpu() or convert it");
  check(cuda::is_head_size(q.size(2)), kOp, ": heads on a CUDA device must have 64, 128 or 256 ",
        "features, got q ", describe(q), "; move it with .cpu()");
  check(reinterpret_cast<uintptr_t>(pool.const_data_ptr()) % 16 == 0, kOp,
        ": pool on a CUDA device must begin at a multiple of 16 bytes, got ", describe(pool),
        " at ", pool.const_data_ptr(), "; copy it with .clone()");

  const GpuCall gpu(kOp, q);
  const Tensor q_c = as_contiguous(q);
  const Tensor slots_c = as_contiguous(slots);
  const Tensor offsets_c = as_contiguous(row_offsets);
  const Tensor sinks_c = sinks.has_value() ? as_contiguous(*sinks, ScalarType::Float) : q_c;
  const Tensor out = gpu.empty({q.size(0), q.size(1), q.size(2)}, ScalarType::Float);
  const Tensor lse = gpu.empty({q.size(0), q.size(1)}, ScalarType::Float);
  cuda::SparseAttention call{};
  call.q = q_c.const_data_ptr();
  call.pool = pool.const_data_ptr();
  call.pool_size = pool.numel();
  call.element = element_of(q.scalar_type());
  call.slots = data<int64_t>(slots_c);
  call.total = slots.numel();
  call.row_offsets = data<int64_t>(offsets_c);
  call.rows = q.size(0);
  call.query_heads = q.size(1);
  call.kv_heads = kv_heads;
  call.dim = q.size(2);
  call.scale = static_cast<float>(scale);
  call.sinks = sinks.has_value() ? data<float>(sinks_c) : nullptr;
  call.softcap = static_cast<float>(softcap.value_or(0));
  call.out = mutable_data<float>(out);
  call.lse = mutable_data<float>(lse);
  int multiprocessors = 0;
  gpu.check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount,
                                   q.get_device_index()));
  call.chunk = cuda::suitable_chunk(call, multiprocessors);
  const Tensor scratch = gpu.empty({cuda::scratch_size(call)}, ScalarType::Float);
  call.scratch = mutable_data<float>(scratch);
  gpu.check(cuda::sparse_attention(call, gpu.stream()));
  return {out, lse};
}

}  // namespace
}  // namespace swarm_kv::ops

STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CUDA, m) {
  m.impl("sparse_attention", SWARM_KV_BOX(swarm_kv::ops::sparse_attention));
}
