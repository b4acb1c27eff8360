#pragma once

#include <cmath>
#include <optional>

#include "core/nibble_scan.h"
#include "ops/cluster_lists.h"
#include "ops/score_queries.h"
#include "ops/tensors.h"

// The checks of the operators that score and select, the same in the CPU and the CUDA library; each
// library checks the device first.
namespace swarm_kv::ops {

constexpr const char* kScoreCodes = "score_codes";
constexpr const char* kScorePackedCodes = "score_packed_codes";
constexpr const char* kScoreClusters = "score_clusters";
constexpr const char* kScoreCodedClusters = "score_coded_clusters";
constexpr const char* kSelectClusters = "select_clusters";
constexpr const char* kSelectIntervals = "select_intervals";
constexpr const char* kSelectTwoLevel = "select_two_level";

// q [Hq, S, D] read as [Hkv, Hq / Hkv * S, D]: the same memory, since the heads of a group are
// neighbours.
inline ScoreQueries grouped(const char* op, const Tensor& q, const Tensor& q_contiguous,
                            int64_t kv_heads) {
  check(q.size(1) >= 1 && q.size(2) >= 1, op,
        ": q must have at least one query and one feature, got ", describe(q));
  check(kv_heads >= 1 && q.size(0) >= 1 && q.size(0) % kv_heads == 0, op, ": the KV heads (",
        kv_heads, ") must divide the query heads of q ", describe(q));
  return {data<float>(q_contiguous), kv_heads, q.size(0) / kv_heads * q.size(1), q.size(2)};
}

inline void check_turn(const char* op, const Tensor& q, int64_t kv_heads,
                       const std::optional<Tensor>& turn) {
  if (!turn) return;
  Argument{op, "turn", *turn}
      .floating()
      .dim(3)
      .size(0, kv_heads, "KV heads")
      .size(1, q.size(2), "features of q")
      .size(2, q.size(2), "features of q");
}

inline void check_score_codes(const Tensor& q, const Tensor& codebooks, const Tensor& codes,
                              const std::optional<Tensor>& turn) {
  const char* op = kScoreCodes;
  Argument{op, "q", q}.floating().dim(3);
  Argument{op, "codebooks", codebooks}.dtype(ScalarType::Float).dim(4);
  Argument{op, "codes", codes}.dtype(ScalarType::Byte).dim(3);
  const int64_t parts = codebooks.size(1), codewords = codebooks.size(2);
  Argument{op, "codes", codes}.size(0, codebooks.size(0), "KV heads").size(1, parts, "parts");
  check(parts >= 1 && parts * codebooks.size(3) == q.size(2), op, ": codebooks ",
        describe(codebooks), " must split q's features into equal parts, q is ", describe(q));
  check(codewords >= 1 && codewords <= 256, op,
        ": codebooks must have 1 to 256 codewords in dimension 2, got ", describe(codebooks));
  check_turn(op, q, codebooks.size(0), turn);
}

inline void check_highest_code(int64_t highest, int64_t codewords) {
  check(highest < codewords, kScoreCodes, ": codes must be below the ", codewords,
        " codewords of codebooks, got ", highest);
}

inline void check_score_packed_codes(const Tensor& q, const Tensor& codebooks, const Tensor& codes,
                                     const std::optional<Tensor>& turn) {
  const char* op = kScorePackedCodes;
  Argument{op, "q", q}.floating().dim(3);
  Argument{op, "codebooks", codebooks}.dtype(ScalarType::Float).dim(4);
  Argument{op, "codes", codes}.dtype(ScalarType::Byte).dim(3);
  const int64_t parts = codebooks.size(1);
  Argument{op, "codebooks", codebooks}.size(2, 16, "codewords of four bits");
  check(parts >= 2 && parts % 2 == 0 && parts <= kScanMaxParts, op, ": codebooks must have 2 to ",
        kScanMaxParts, " parts, an even number of them, got ", describe(codebooks));
  Argument{op, "codes", codes}
      .size(0, codebooks.size(0), "KV heads")
      .size(1, parts / 2, "parts / 2");
  check(parts * codebooks.size(3) == q.size(2), op, ": codebooks ", describe(codebooks),
        " must split q's features into equal parts, q is ", describe(q));
  check_turn(op, q, codebooks.size(0), turn);
}

inline void check_score_clusters(const Tensor& q, const Tensor& keys) {
  Argument{kScoreClusters, "q", q}.floating().dim(3);
  Argument{kScoreClusters, "keys", keys}.floating().dim(3).size(2, q.size(2), "features of q");
}

inline void check_score_coded_clusters(const Tensor& q, const Tensor& keys, const Tensor& scales) {
  const char* op = kScoreCodedClusters;
  Argument{op, "q", q}.floating().dim(3);
  Argument{op, "keys", keys}.dtype(ScalarType::Byte).dim(3);
  Argument{op, "scales", scales}.dtype(ScalarType::Float).dim(2);
  Argument{op, "scales", scales}
      .size(0, keys.size(0), "KV heads of keys")
      .size(1, q.size(2), "features of q");
  check(2 * keys.size(2) == q.size(2), op, ": keys must hold two features per byte, got ",
        describe(keys), " for q ", describe(q));
}

inline void check_lists(const char* op, const Tensor& offsets, const Tensor& members) {
  Argument{op, "offsets", offsets}.dtype(ScalarType::Int).dim(1);
  Argument{op, "members", members}.dtype(ScalarType::Int).dim(1);
  check(offsets.numel() >= 1, op, ": offsets must have at least one value, got ",
        describe(offsets));
}

inline void check_budget(const char* op, int64_t budget) {
  check(budget >= 0, op, ": budget must not be negative, got ", budget);
}

inline void check_request_cost(const char* op, double request_cost) {
  check(request_cost >= 0 && std::isfinite(request_cost), op,
        ": request_cost must be finite and not negative, got ", request_cost);
}

inline void check_select_clusters(const Tensor& scores, const Tensor& offsets,
                                  const Tensor& members, int64_t budget) {
  Argument{kSelectClusters, "scores", scores}.floating().dim(1);
  check_lists(kSelectClusters, offsets, members);
  Argument{kSelectClusters, "offsets", offsets}.size(0, scores.numel() + 1, "scores + 1");
  check_budget(kSelectClusters, budget);
}

inline void check_select_two_level(const Tensor& probs, const Tensor& offsets,
                                   const Tensor& members, int64_t budget, double request_cost,
                                   double single_share) {
  Argument{kSelectTwoLevel, "probs", probs}.floating().dim(1);
  check_lists(kSelectTwoLevel, offsets, members);
  check_budget(kSelectTwoLevel, budget);
  check_request_cost(kSelectTwoLevel, request_cost);
  check(single_share >= 0 && single_share <= 1, kSelectTwoLevel,
        ": single_share must be within [0, 1], got ", single_share);
}

inline void check_no_nan(const char* op, const char* name, bool nan) {
  check(!nan, op, ": ", name, " must not be NaN");
}

// Every member must be in [0, entries), where entries < 0 stands for no limit.
inline void check_members(const char* op, int64_t least, int64_t greatest, int64_t entries) {
  check(least >= 0, op, ": members must not be negative, got ", least);
  check(entries < 0 || greatest < entries, op, ": members must be below the ", entries,
        " entries of probs, got ", greatest);
}

// `total` members; `name` is that of the values.
inline void check_facts(const char* op, const char* name, const ListFacts& facts, int64_t total,
                        int64_t entries) {
  check(facts.first_offset == 0 && facts.last_offset <= total, op,
        ": offsets must run from 0 to at most members' length ", total, ", got ",
        facts.first_offset, " to ", facts.last_offset);
  check(facts.decreases == 0, op, ": offsets must not decrease");
  check_members(op, facts.least_member, facts.greatest_member, entries);
  check_no_nan(op, name, facts.nan != 0);
}

}  // namespace swarm_kv::ops
