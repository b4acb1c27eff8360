#include <algorithm>
#include <tuple>

#include "ops/cuda/gpu_call.h"
#include "ops/cuda/selection.h"
#include "ops/selection_checks.h"

namespace swarm_kv::ops {
namespace {

// Rounds of settle_gains between two looks at what is left.
constexpr int kRounds = 8;

// Contiguous arguments, and what was found in them.
struct Lists {
  Tensor values;
  Tensor offsets;
  Tensor members;
  ListFacts facts;

  ClusterLists view(int64_t entries) const {
    return {data<int32_t>(offsets), data<int32_t>(members), offsets.numel() - 1, entries};
  }
};

Lists inspected(const GpuCall& call, const Tensor& values, const Tensor& offsets,
                const Tensor& members) {
  Lists lists{
      as_contiguous(values, ScalarType::Float), as_contiguous(offsets), as_contiguous(members), {}};
  const Tensor facts = call.bytes(sizeof(ListFacts));
  call.check(cuda::inspect_lists(data<float>(lists.values), values.numel(),
                                 data<int32_t>(lists.offsets), offsets.numel() - 1,
                                 data<int32_t>(lists.members), members.numel(),
                                 static_cast<ListFacts*>(facts.mutable_data_ptr()), call.stream()));
  lists.facts = call.read<ListFacts>(facts);
  return lists;
}

Tensor head(Tensor tensor, int64_t count) { return torch::stable::narrow(tensor, 0, 0, count); }

Tensor select_clusters(const Tensor& scores, const Tensor& offsets, const Tensor& members,
                       int64_t budget) {
  const char* op = kSelectClusters;
  check_on_one_gpu(op, {{"scores", scores}, {"offsets", offsets}, {"members", members}});
  check_select_clusters(scores, offsets, members, budget);
  const GpuCall call(op, scores);
  call.refuse_capture();
  const Lists lists = inspected(call, scores, offsets, members);
  check_facts(op, "scores", lists.facts, members.numel(), -1);
  const ClusterLists view = lists.view(int64_t{lists.facts.greatest_member} + 1);
  const Tensor ids = call.empty({view.count}, ScalarType::Long);
  const Tensor selected = call.bytes(sizeof(cuda::Selected));
  const Tensor scratch = call.bytes(cuda::select_clusters_scratch(view));
  call.check(cuda::select_clusters(data<float>(lists.values), view, budget,
                                   mutable_data<int64_t>(ids),
                                   static_cast<cuda::Selected*>(selected.mutable_data_ptr()),
                                   scratch.mutable_data_ptr(), call.stream()));
  return head(ids, call.read<cuda::Selected>(selected).clusters);
}

std::tuple<Tensor, Tensor> select_two_level(const Tensor& probs, const Tensor& offsets,
                                            const Tensor& members, int64_t budget,
                                            double request_cost, double single_share) {
  const char* op = kSelectTwoLevel;
  check_on_one_gpu(op, {{"probs", probs}, {"offsets", offsets}, {"members", members}});
  check_select_two_level(probs, offsets, members, budget, request_cost, single_share);
  const GpuCall call(op, probs);
  call.refuse_capture();
  const Lists lists = inspected(call, probs, offsets, members);
  check_facts(op, "probs", lists.facts, members.numel(), probs.numel());
  const ClusterLists view = lists.view(probs.numel());
  const Tensor ids = call.empty({view.count}, ScalarType::Long);
  const Tensor entries = call.empty({std::min(budget, view.entries)}, ScalarType::Long);
  if (budget >= view.entries) {
    call.check(cuda::all_entries(view.entries, mutable_data<int64_t>(entries), call.stream()));
    return {head(ids, 0), entries};
  }
  const cuda::TwoLevel two{data<float>(lists.values), view, budget, request_cost, single_share};
  const Tensor selected = call.bytes(sizeof(cuda::Selected));
  const Tensor open = call.empty({1}, ScalarType::Int);
  const Tensor scratch = call.bytes(cuda::select_two_level_scratch(view));
  bool first = true;
  do {
    call.check(cuda::settle_gains(two, first, kRounds, mutable_data<int32_t>(open),
                                  scratch.mutable_data_ptr(), call.stream()));
    first = false;
  } while (call.read<int32_t>(open) > 0);
  call.check(cuda::take_two_level(two, mutable_data<int64_t>(ids), mutable_data<int64_t>(entries),
                                  static_cast<cuda::Selected*>(selected.mutable_data_ptr()),
                                  scratch.mutable_data_ptr(), call.stream()));
  const auto found = call.read<cuda::Selected>(selected);
  return {head(ids, found.clusters), head(entries, found.entries)};
}

}  // namespace
}  // namespace swarm_kv::ops

STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CUDA, m) {
  m.impl("select_clusters", SWARM_KV_BOX(swarm_kv::ops::select_clusters));
  m.impl("select_two_level", SWARM_KV_BOX(swarm_kv::ops::select_two_level));
}
