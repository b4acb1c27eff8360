#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "ops/cpu/intervals.h"
#include "ops/cpu/scoring.h"
#include "ops/cpu/selection.h"
#include "ops/selection_checks.h"

namespace swarm_kv::ops {
namespace {

// The queries of a score, turned where there is a `turn`.
class TurnedQueries {
 public:
  TurnedQueries(const char* op, const Tensor& q, int64_t kv_heads,
                const std::optional<Tensor>& turn)
      : q_(as_contiguous(q, ScalarType::Float)), queries_(grouped(op, q, q_, kv_heads)) {
    if (!turn) return;
    turned_.resize(q.numel());
    if (turn->scalar_type() == ScalarType::Half) {
      turn_by<fp16>(as_contiguous(*turn));
    } else {
      turn_by<float>(as_contiguous(*turn, ScalarType::Float));
    }
    queries_.data = turned_.data();
  }

  const ScoreQueries& get() const { return queries_; }

 private:
  template <typename T>
  void turn_by(const Tensor& turn) {
    cpu::turn_queries(queries_, data<T>(turn), turned_.data());
  }

  Tensor q_;
  ScoreQueries queries_;
  std::vector<float> turned_;
};

Tensor score_codes(const Tensor& q, const Tensor& codebooks, const Tensor& codes, double scale,
                   const std::optional<Tensor>& turn) {
  check_on_cpu(kScoreCodes, {{"q", q}, {"codebooks", codebooks}, {"codes", codes}});
  if (turn) check_on_cpu(kScoreCodes, {{"turn", *turn}});
  check_score_codes(q, codebooks, codes, turn);
  const int64_t codewords = codebooks.size(2), items = codes.size(2);
  const TurnedQueries queries(kScoreCodes, q, codebooks.size(0), turn);
  const Tensor codebooks_c = as_contiguous(codebooks);
  const Tensor codes_c = as_contiguous(codes);
  if (codewords < 256) {
    check_highest_code(cpu::max_code(data<uint8_t>(codes_c), codes_c.numel()), codewords);
  }
  const Tensor out = empty_cpu({items}, ScalarType::Float);
  if (items > 0) {
    cpu::score_codes(queries.get(), data<float>(codebooks_c), codebooks.size(1), codewords,
                     data<uint8_t>(codes_c), items, static_cast<float>(scale),
                     mutable_data<float>(out));
  }
  return out;
}

Tensor score_packed_codes(const Tensor& q, const Tensor& codebooks, const Tensor& codes,
                          double scale, const std::optional<Tensor>& turn) {
  const char* op = kScorePackedCodes;
  check_on_cpu(op, {{"q", q}, {"codebooks", codebooks}, {"codes", codes}});
  if (turn) check_on_cpu(op, {{"turn", *turn}});
  check_score_packed_codes(q, codebooks, codes, turn);
  const TurnedQueries queries(op, q, codebooks.size(0), turn);
  const Tensor codebooks_c = as_contiguous(codebooks), codes_c = as_contiguous(codes);
  const int64_t items = codes.size(2);
  const Tensor out = empty_cpu({items}, ScalarType::Float);
  if (items > 0) {
    cpu::score_packed_codes(queries.get(), data<float>(codebooks_c), codebooks.size(1),
                            data<uint8_t>(codes_c), items, static_cast<float>(scale),
                            mutable_data<float>(out));
  }
  return out;
}

Tensor score_clusters(const Tensor& q, const Tensor& keys, double scale) {
  check_on_cpu(kScoreClusters, {{"q", q}, {"keys", keys}});
  check_score_clusters(q, keys);
  const Tensor q_c = as_contiguous(q, ScalarType::Float);
  const ScoreQueries queries = grouped(kScoreClusters, q, q_c, keys.size(0));
  const bool half = keys.scalar_type() == ScalarType::Half;
  const bool brain = keys.scalar_type() == ScalarType::BFloat16;
  const Tensor keys_c =
      half || brain ? as_contiguous(keys) : as_contiguous(keys, ScalarType::Float);
  const int64_t items = keys.size(1);
  const Tensor out = empty_cpu({items}, ScalarType::Float);
  if (items == 0) return out;
  const float factor = static_cast<float>(scale);
  if (half) {
    cpu::score_keys(queries, data<fp16>(keys_c), items, factor, mutable_data<float>(out));
  } else if (brain) {
    cpu::score_keys(queries, data<bf16>(keys_c), items, factor, mutable_data<float>(out));
  } else {
    cpu::score_keys(queries, data<float>(keys_c), items, factor, mutable_data<float>(out));
  }
  return out;
}

Tensor score_coded_clusters(const Tensor& q, const Tensor& keys, const Tensor& scales,
                            double scale) {
  const char* op = kScoreCodedClusters;
  check_on_cpu(op, {{"q", q}, {"keys", keys}, {"scales", scales}});
  check_score_coded_clusters(q, keys, scales);
  const Tensor q_c = as_contiguous(q, ScalarType::Float);
  const ScoreQueries queries = grouped(op, q, q_c, keys.size(0));
  const Tensor keys_c = as_contiguous(keys), scales_c = as_contiguous(scales);
  const Tensor out = empty_cpu({keys.size(1)}, ScalarType::Float);
  if (keys.size(1) > 0) {
    cpu::score_coded_keys(queries, data<uint8_t>(keys_c), data<float>(scales_c), keys.size(1),
                          static_cast<float>(scale), mutable_data<float>(out));
  }
  return out;
}

// The facts of contiguous tensors; `values` is what is ranked by.
ListFacts facts_of(const Tensor& values, const Tensor& offsets, const Tensor& members) {
  const int64_t count = offsets.numel() - 1;
  const int32_t* first = data<int32_t>(offsets);
  const int32_t* member = data<int32_t>(members);
  const float* value = data<float>(values);
  ListFacts facts{first[0], first[count], 0, 0, -1, 0};
  for (int64_t c = 0; c < count; ++c) facts.decreases |= first[c + 1] < first[c] ? 1 : 0;
  for (int64_t i = 0; i < members.numel(); ++i) {
    facts.least_member = std::min(facts.least_member, member[i]);
    facts.greatest_member = std::max(facts.greatest_member, member[i]);
  }
  for (int64_t i = 0; i < values.numel(); ++i) facts.nan |= std::isnan(value[i]) ? 1 : 0;
  return facts;
}

Tensor select_clusters(const Tensor& scores, const Tensor& offsets, const Tensor& members,
                       int64_t budget) {
  check_on_cpu(kSelectClusters, {{"scores", scores}, {"offsets", offsets}, {"members", members}});
  check_select_clusters(scores, offsets, members, budget);
  const Tensor scores_c = as_contiguous(scores, ScalarType::Float);
  const Tensor offsets_c = as_contiguous(offsets), members_c = as_contiguous(members);
  const ListFacts facts = facts_of(scores_c, offsets_c, members_c);
  check_facts(kSelectClusters, "scores", facts, members.numel(), -1);
  const ClusterLists lists{data<int32_t>(offsets_c), data<int32_t>(members_c), scores.numel(),
                           int64_t{facts.greatest_member} + 1};
  return int64_tensor(cpu::select_clusters(data<float>(scores_c), lists, budget));
}

std::tuple<Tensor, Tensor> select_two_level(const Tensor& probs, const Tensor& offsets,
                                            const Tensor& members, int64_t budget,
                                            double request_cost, double single_share) {
  check_on_cpu(kSelectTwoLevel, {{"probs", probs}, {"offsets", offsets}, {"members", members}});
  check_select_two_level(probs, offsets, members, budget, request_cost, single_share);
  const Tensor probs_c = as_contiguous(probs, ScalarType::Float);
  const Tensor offsets_c = as_contiguous(offsets), members_c = as_contiguous(members);
  const int64_t entries = probs.numel();
  check_facts(kSelectTwoLevel, "probs", facts_of(probs_c, offsets_c, members_c), members.numel(),
              entries);
  if (budget >= entries) {
    std::vector<int64_t> all(entries);
    std::iota(all.begin(), all.end(), 0);
    return {int64_tensor(std::vector<int64_t>()), int64_tensor(all)};
  }
  const ClusterLists lists{data<int32_t>(offsets_c), data<int32_t>(members_c), offsets.numel() - 1,
                           entries};
  const cpu::TwoLevelSelection selection =
      cpu::select_two_level(data<float>(probs_c), lists, budget, request_cost, single_share);
  return {int64_tensor(selection.clusters), int64_tensor(selection.entries)};
}

Tensor select_intervals(const Tensor& probs, const Tensor& members, int64_t budget,
                        double request_cost) {
  const char* op = kSelectIntervals;
  check_on_cpu(op, {{"probs", probs}, {"members", members}});
  Argument{op, "probs", probs}.floating().dim(1);
  Argument{op, "members", members}.dtype(ScalarType::Int).dim(1);
  check_budget(op, budget);
  check_request_cost(op, request_cost);
  const Tensor probs_c = as_contiguous(probs, ScalarType::Float);
  const Tensor members_c = as_contiguous(members);
  const float* values = data<float>(probs_c);
  const int64_t entries = probs_c.numel(), count = members_c.numel();
  const int32_t* member = data<int32_t>(members_c);
  int32_t least = 0, greatest = -1;
  for (int64_t i = 0; i < count; ++i) {
    least = std::min(least, member[i]);
    greatest = std::max(greatest, member[i]);
  }
  check_members(op, least, greatest, entries);
  if (!cpu::all_amounts(values, entries)) {
    check_no_nan(op, "probs",
                 std::any_of(values, values + entries, [](float v) { return std::isnan(v); }));
    const auto [low, high] = std::minmax_element(values, values + entries);
    check(*low >= 0 && std::isfinite(*high), op, ": probs must be finite and not negative, got ",
          *low < 0 ? *low : *high);
  }
  return int64_tensor(cpu::select_intervals(values, entries, member, count, budget, request_cost));
}

}  // namespace
}  // namespace swarm_kv::ops

STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CPU, m) {
  m.impl("score_codes", SWARM_KV_BOX(swarm_kv::ops::score_codes));
  m.impl("score_packed_codes", SWARM_KV_BOX(swarm_kv::ops::score_packed_codes));
  m.impl("score_clusters", SWARM_KV_BOX(swarm_kv::ops::score_clusters));
  m.impl("score_coded_clusters", SWARM_KV_BOX(swarm_kv::ops::score_coded_clusters));
  m.impl("select_clusters", SWARM_KV_BOX(swarm_kv::ops::select_clusters));
  m.impl("select_intervals", SWARM_KV_BOX(swarm_kv::ops::select_intervals));
  m.impl("select_two_level", SWARM_KV_BOX(swarm_kv::ops::select_two_level));
}
