#include <tuple>

#include "ops/cuda/gpu_call.h"
#include "ops/cuda/merge_attention.h"
#include "ops/merge_checks.h"

namespace swarm_kv::ops {
namespace {

template <typename Acc>
void launch(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b,
            const Tensor& out, const Tensor& lse, const GpuCall& call) {
  call.check(cuda::merge_attention(data<Acc>(out_a), data<Acc>(lse_a), data<Acc>(out_b),
                                   data<Acc>(lse_b), lse_a.numel(), out_a.size(out_a.dim() - 1),
                                   mutable_data<Acc>(out), mutable_data<Acc>(lse), call.stream()));
}

std::tuple<Tensor, Tensor> merge_attention(const Tensor& out_a, const Tensor& lse_a,
                                           const Tensor& out_b, const Tensor& lse_b) {
  check(out_a.is_cuda(),
        "merge_attention: out_a must be on a CUDA device like the other arguments");
  check_merge_arguments(out_a, lse_a, out_b, lse_b);
  const GpuCall call("merge_attention", out_a);
  const Tensor a = as_contiguous(out_a), a_lse = as_contiguous(lse_a);
  const Tensor b = as_contiguous(out_b), b_lse = as_contiguous(lse_b);
  const Tensor out = torch::stable::empty_like(a);
  const Tensor lse = torch::stable::empty_like(a_lse);
  if (out_a.scalar_type() == ScalarType::Double) {
    launch<double>(a, a_lse, b, b_lse, out, lse, call);
  } else {
    launch<float>(a, a_lse, b, b_lse, out, lse, call);
  }
  return {out, lse};
}

}  // namespace
}  // namespace swarm_kv::ops

STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CUDA, m) {
  m.impl("merge_attention", SWARM_KV_BOX(swarm_kv::ops::merge_attention));
}
