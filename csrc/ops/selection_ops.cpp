#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>
#include <vector>

#include "ops/cpu/scoring.h"
#include "ops/cpu/selection.h"
#include "ops/tensors.h"

namespace swarm_kv::ops {
namespace {

constexpr const char* kScoreCodes = "score_codes";
constexpr const char* kScoreClusters = "score_clusters";
constexpr const char* kSelectClusters = "select_clusters";
constexpr const char* kSelectTwoLevel = "select_two_level";

// q [Hq, S, D] read as [Hkv, Hq / Hkv * S, D]: the same memory, since the heads of a group are
// neighbours.
cpu::ScoreQueries grouped(const char* op, const Tensor& q, const Tensor& q_contiguous,
                          int64_t kv_heads) {
  check(q.size(1) >= 1 && q.size(2) >= 1, op,
        ": q must have at least one query and one feature, got ", describe(q));
  check(kv_heads >= 1 && q.size(0) >= 1 && q.size(0) % kv_heads == 0, op, ": the KV heads (",
        kv_heads, ") must divide the query heads of q ", describe(q));
  return {data<float>(q_contiguous), kv_heads, q.size(0) / kv_heads * q.size(1), q.size(2)};
}

Tensor score_codes(const Tensor& q, const Tensor& codebooks, const Tensor& codes, double scale) {
  Argument{kScoreCodes, "q", q}.on_cpu().floating().dim(3);
  Argument{kScoreCodes, "codebooks", codebooks}.on_cpu().dtype(ScalarType::Float).dim(4);
  Argument{kScoreCodes, "codes", codes}.on_cpu().dtype(ScalarType::Byte).dim(3);
  const int64_t kv_heads = codebooks.size(0), parts = codebooks.size(1),
                codewords = codebooks.size(2);
  const int64_t items = codes.size(2);
  Argument{kScoreCodes, "codes", codes}.size(0, kv_heads, "KV heads").size(1, parts, "parts");
  check(parts >= 1 && parts * codebooks.size(3) == q.size(2), kScoreCodes, ": codebooks ",
        describe(codebooks), " must split q's features into equal parts, q is ", describe(q));
  check(codewords >= 1 && codewords <= 256, kScoreCodes,
        ": codebooks must have 1 to 256 codewords in dimension 2, got ", describe(codebooks));
  const Tensor q_c = as_contiguous(q, ScalarType::Float);
  const cpu::ScoreQueries queries = grouped(kScoreCodes, q, q_c, kv_heads);
  const Tensor codebooks_c = as_contiguous(codebooks);
  const Tensor codes_c = as_contiguous(codes);
  if (codewords < 256) {
    const int64_t highest = cpu::max_code(data<uint8_t>(codes_c), codes_c.numel());
    check(highest < codewords || codes_c.numel() == 0, kScoreCodes, ": codes must be below the ",
          codewords, " codewords of codebooks, got ", highest);
  }
  const Tensor out = empty_cpu({items}, ScalarType::Float);
  if (items > 0) {
    cpu::score_codes(queries, data<float>(codebooks_c), parts, codewords, data<uint8_t>(codes_c),
                     items, static_cast<float>(scale), mutable_data<float>(out));
  }
  return out;
}

Tensor score_clusters(const Tensor& q, const Tensor& keys, double scale) {
  Argument{kScoreClusters, "q", q}.on_cpu().floating().dim(3);
  Argument{kScoreClusters, "keys", keys}.on_cpu().floating().dim(3).size(2, q.size(2),
                                                                         "features of q");
  const Tensor q_c = as_contiguous(q, ScalarType::Float);
  const cpu::ScoreQueries queries = grouped(kScoreClusters, q, q_c, keys.size(0));
  const Tensor keys_c = as_contiguous(keys, ScalarType::Float);
  const Tensor out = empty_cpu({keys.size(1)}, ScalarType::Float);
  if (keys.size(1) > 0) {
    cpu::score_keys(queries, data<float>(keys_c), keys.size(1), static_cast<float>(scale),
                    mutable_data<float>(out));
  }
  return out;
}

void check_lists(const char* op, const Tensor& offsets, const Tensor& members) {
  Argument{op, "offsets", offsets}.on_cpu().dtype(ScalarType::Long).dim(1);
  Argument{op, "members", members}.on_cpu().dtype(ScalarType::Long).dim(1);
  check(offsets.numel() >= 1, op, ": offsets must have at least one value, got ",
        describe(offsets));
}

// Checks the values of the lists; every member must be in [0, entries), where entries < 0 stands
// for one more than the greatest.
cpu::ClusterLists cluster_lists(const char* op, const Tensor& offsets, const Tensor& members,
                                int64_t entries) {
  const int64_t count = offsets.numel() - 1, total = members.numel();
  const int64_t* first = data<int64_t>(offsets);
  const int64_t* member = data<int64_t>(members);
  check(first[0] == 0 && first[count] == total, op, ": offsets must run from 0 to members' length ",
        total, ", got ", first[0], " to ", first[count]);
  bool ascending = true;
  for (int64_t c = 0; c < count; ++c) ascending &= first[c] <= first[c + 1];
  check(ascending, op, ": offsets must not decrease");
  int64_t low = 0, high = -1;
  for (int64_t i = 0; i < total; ++i) {
    low = std::min(low, member[i]);
    high = std::max(high, member[i]);
  }
  check(low >= 0, op, ": members must not be negative, got ", low);
  check(entries < 0 || high < entries, op, ": members must be below the ", entries,
        " entries of probs, got ", high);
  return {first, member, count, entries < 0 ? high + 1 : entries};
}

void check_no_nan(const char* op, const char* name, const float* values, int64_t count) {
  bool nan = false;
  for (int64_t i = 0; i < count; ++i) nan |= std::isnan(values[i]);
  check(!nan, op, ": ", name, " must not be NaN");
}

Tensor select_clusters(const Tensor& scores, const Tensor& offsets, const Tensor& members,
                       int64_t budget) {
  Argument{kSelectClusters, "scores", scores}.on_cpu().floating().dim(1);
  check_lists(kSelectClusters, offsets, members);
  Argument{kSelectClusters, "offsets", offsets}.size(0, scores.numel() + 1, "scores + 1");
  check(budget >= 0, kSelectClusters, ": budget must not be negative, got ", budget);
  const Tensor scores_c = as_contiguous(scores, ScalarType::Float);
  const Tensor offsets_c = as_contiguous(offsets), members_c = as_contiguous(members);
  const cpu::ClusterLists lists = cluster_lists(kSelectClusters, offsets_c, members_c, -1);
  check_no_nan(kSelectClusters, "scores", data<float>(scores_c), scores_c.numel());
  return int64_tensor(cpu::select_clusters(data<float>(scores_c), lists, budget));
}

std::tuple<Tensor, Tensor> select_two_level(const Tensor& probs, const Tensor& offsets,
                                            const Tensor& members, int64_t budget,
                                            double request_cost, double single_share) {
  Argument{kSelectTwoLevel, "probs", probs}.on_cpu().floating().dim(1);
  check_lists(kSelectTwoLevel, offsets, members);
  check(budget >= 0, kSelectTwoLevel, ": budget must not be negative, got ", budget);
  check(request_cost >= 0 && std::isfinite(request_cost), kSelectTwoLevel,
        ": request_cost must be finite and not negative, got ", request_cost);
  check(single_share >= 0 && single_share <= 1, kSelectTwoLevel,
        ": single_share must be within [0, 1], got ", single_share);
  const Tensor probs_c = as_contiguous(probs, ScalarType::Float);
  const Tensor offsets_c = as_contiguous(offsets), members_c = as_contiguous(members);
  const cpu::ClusterLists lists =
      cluster_lists(kSelectTwoLevel, offsets_c, members_c, probs_c.numel());
  check_no_nan(kSelectTwoLevel, "probs", data<float>(probs_c), probs_c.numel());
  if (budget >= probs_c.numel()) {
    std::vector<int64_t> all(probs_c.numel());
    std::iota(all.begin(), all.end(), 0);
    return {int64_tensor(std::vector<int64_t>()), int64_tensor(all)};
  }
  const cpu::TwoLevelSelection selection =
      cpu::select_two_level(data<float>(probs_c), lists, budget, request_cost, single_share);
  return {int64_tensor(selection.clusters), int64_tensor(selection.entries)};
}

}  // namespace
}  // namespace swarm_kv::ops

STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CPU, m) {
  m.impl("score_codes", SWARM_KV_BOX(swarm_kv::ops::score_codes));
  m.impl("score_clusters", SWARM_KV_BOX(swarm_kv::ops::score_clusters));
  m.impl("select_clusters", SWARM_KV_BOX(swarm_kv::ops::select_clusters));
  m.impl("select_two_level", SWARM_KV_BOX(swarm_kv::ops::select_two_level));
}
