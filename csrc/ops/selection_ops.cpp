#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>
#include <vector>

#include "core/nibble_scan.h"
#include "ops/cpu/intervals.h"
#include "ops/cpu/scoring.h"
#include "ops/cpu/selection.h"
#include "ops/tensors.h"

namespace swarm_kv::ops {
namespace {

constexpr const char* kScoreCodes = "score_codes";
constexpr const char* kScorePackedCodes = "score_packed_codes";
constexpr const char* kScoreClusters = "score_clusters";
constexpr const char* kScoreCodedClusters = "score_coded_clusters";
constexpr const char* kSelectClusters = "select_clusters";
constexpr const char* kSelectIntervals = "select_intervals";
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

Tensor score_packed_codes(const Tensor& q, const Tensor& codebooks, const Tensor& codes,
                          double scale) {
  const char* op = kScorePackedCodes;
  Argument{op, "q", q}.on_cpu().floating().dim(3);
  Argument{op, "codebooks", codebooks}.on_cpu().dtype(ScalarType::Float).dim(4);
  Argument{op, "codes", codes}.on_cpu().dtype(ScalarType::Byte).dim(3);
  const int64_t kv_heads = codebooks.size(0), parts = codebooks.size(1);
  Argument{op, "codebooks", codebooks}.size(2, 16, "codewords of four bits");
  check(parts >= 2 && parts % 2 == 0 && parts <= kScanMaxParts, op, ": codebooks must have 2 to ",
        kScanMaxParts, " parts, an even number of them, got ", describe(codebooks));
  Argument{op, "codes", codes}.size(0, kv_heads, "KV heads").size(1, parts / 2, "parts / 2");
  check(parts * codebooks.size(3) == q.size(2), op, ": codebooks ", describe(codebooks),
        " must split q's features into equal parts, q is ", describe(q));
  const Tensor q_c = as_contiguous(q, ScalarType::Float);
  const cpu::ScoreQueries queries = grouped(op, q, q_c, kv_heads);
  const Tensor codebooks_c = as_contiguous(codebooks), codes_c = as_contiguous(codes);
  const int64_t items = codes.size(2);
  const Tensor out = empty_cpu({items}, ScalarType::Float);
  if (items > 0) {
    cpu::score_packed_codes(queries, data<float>(codebooks_c), parts, data<uint8_t>(codes_c), items,
                            static_cast<float>(scale), mutable_data<float>(out));
  }
  return out;
}

Tensor score_clusters(const Tensor& q, const Tensor& keys, double scale) {
  Argument{kScoreClusters, "q", q}.on_cpu().floating().dim(3);
  Argument{kScoreClusters, "keys", keys}.on_cpu().floating().dim(3).size(2, q.size(2),
                                                                         "features of q");
  const Tensor q_c = as_contiguous(q, ScalarType::Float);
  const cpu::ScoreQueries queries = grouped(kScoreClusters, q, q_c, keys.size(0));
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
  Argument{op, "q", q}.on_cpu().floating().dim(3);
  Argument{op, "keys", keys}.on_cpu().dtype(ScalarType::Byte).dim(3);
  Argument{op, "scales", scales}.on_cpu().dtype(ScalarType::Float).dim(2);
  Argument{op, "scales", scales}
      .size(0, keys.size(0), "KV heads of keys")
      .size(1, q.size(2), "features of q");
  check(2 * keys.size(2) == q.size(2), op, ": keys must hold two features per byte, got ",
        describe(keys), " for q ", describe(q));
  const Tensor q_c = as_contiguous(q, ScalarType::Float);
  const cpu::ScoreQueries queries = grouped(op, q, q_c, keys.size(0));
  const Tensor keys_c = as_contiguous(keys), scales_c = as_contiguous(scales);
  const Tensor out = empty_cpu({keys.size(1)}, ScalarType::Float);
  if (keys.size(1) > 0) {
    cpu::score_coded_keys(queries, data<uint8_t>(keys_c), data<float>(scales_c), keys.size(1),
                          static_cast<float>(scale), mutable_data<float>(out));
  }
  return out;
}

void check_lists(const char* op, const Tensor& offsets, const Tensor& members) {
  Argument{op, "offsets", offsets}.on_cpu().dtype(ScalarType::Int).dim(1);
  Argument{op, "members", members}.on_cpu().dtype(ScalarType::Int).dim(1);
  check(offsets.numel() >= 1, op, ": offsets must have at least one value, got ",
        describe(offsets));
}

// The greatest member, or -1. Every one must be in [0, entries), where entries < 0 stands for no
// limit.
int32_t check_members(const char* op, const int32_t* members, int64_t count, int64_t entries) {
  int32_t low = 0, high = -1;
  for (int64_t i = 0; i < count; ++i) {
    low = std::min(low, members[i]);
    high = std::max(high, members[i]);
  }
  check(low >= 0, op, ": members must not be negative, got ", low);
  check(entries < 0 || high < entries, op, ": members must be below the ", entries,
        " entries of probs, got ", high);
  return high;
}

// Checks the values of the lists; every member must be in [0, entries), where entries < 0 stands
// for one more than the greatest.
cpu::ClusterLists cluster_lists(const char* op, const Tensor& offsets, const Tensor& members,
                                int64_t entries) {
  const int64_t count = offsets.numel() - 1, total = members.numel();
  const int32_t* first = data<int32_t>(offsets);
  const int32_t* member = data<int32_t>(members);
  check(first[0] == 0 && first[count] <= total, op,
        ": offsets must run from 0 to at most members' length ", total, ", got ", first[0], " to ",
        first[count]);
  bool ascending = true;
  for (int64_t c = 0; c < count; ++c) ascending &= first[c] <= first[c + 1];
  check(ascending, op, ": offsets must not decrease");
  const int32_t high = check_members(op, member, total, entries);
  return {first, member, count, entries < 0 ? int64_t{high} + 1 : entries};
}

void check_no_nan(const char* op, const char* name, const float* values, int64_t count) {
  bool nan = false;
  for (int64_t i = 0; i < count; ++i) nan |= std::isnan(values[i]);
  check(!nan, op, ": ", name, " must not be NaN");
}

void check_budget(const char* op, int64_t budget) {
  check(budget >= 0, op, ": budget must not be negative, got ", budget);
}

void check_request_cost(const char* op, double request_cost) {
  check(request_cost >= 0 && std::isfinite(request_cost), op,
        ": request_cost must be finite and not negative, got ", request_cost);
}

Tensor select_clusters(const Tensor& scores, const Tensor& offsets, const Tensor& members,
                       int64_t budget) {
  Argument{kSelectClusters, "scores", scores}.on_cpu().floating().dim(1);
  check_lists(kSelectClusters, offsets, members);
  Argument{kSelectClusters, "offsets", offsets}.size(0, scores.numel() + 1, "scores + 1");
  check_budget(kSelectClusters, budget);
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
  check_budget(kSelectTwoLevel, budget);
  check_request_cost(kSelectTwoLevel, request_cost);
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

Tensor select_intervals(const Tensor& probs, const Tensor& members, int64_t budget,
                        double request_cost) {
  const char* op = kSelectIntervals;
  Argument{op, "probs", probs}.on_cpu().floating().dim(1);
  Argument{op, "members", members}.on_cpu().dtype(ScalarType::Int).dim(1);
  check_budget(op, budget);
  check_request_cost(op, request_cost);
  const Tensor probs_c = as_contiguous(probs, ScalarType::Float);
  const Tensor members_c = as_contiguous(members);
  const float* values = data<float>(probs_c);
  const int64_t entries = probs_c.numel(), count = members_c.numel();
  check_members(op, data<int32_t>(members_c), count, entries);
  check_no_nan(op, "probs", values, entries);
  float low = 0, high = 0;
  for (int64_t i = 0; i < entries; ++i) {
    low = std::min(low, values[i]);
    high = std::max(high, values[i]);
  }
  check(low >= 0 && std::isfinite(high), op, ": probs must be finite and not negative, got ",
        low < 0 ? low : high);
  return int64_tensor(cpu::select_intervals(values, entries, data<int32_t>(members_c), count,
                                            budget, request_cost));
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
