#include "core/tier.h"

#include <algorithm>
#include <numeric>

#include "core/registry.h"
#include "io/error.h"

namespace swarm_kv {
namespace {

class Printed : public TierScore {
 public:
  double score(const TierCandidate& c) const override {
    return (c.activations * c.t_base + c.size * c.t_transfer) / c.size;
  }
};

class Product : public TierScore {
 public:
  double score(const TierCandidate& c) const override {
    return c.activations * (c.t_base + c.size * c.t_transfer) / c.size;
  }
};

const Registry<TierScore>& registry() {
  static const Registry<TierScore> kRegistry(
      "initial_fill", {registered<TierScore, Printed>("printed"),
                       registered<TierScore, Product>("product"),
                       {"none", [] { return std::unique_ptr<TierScore>(); }}});
  return kRegistry;
}

TierCandidate candidate_of(const Segment& segment, int64_t first, int64_t last,
                           std::span<const int32_t> activations,
                           const std::vector<DriveShape>& drives) {
  TierCandidate candidate{0, static_cast<double>(last - first), 0, 0};
  std::vector<bool> holds(drives.size());
  for (int64_t p = first; p < last; ++p) {
    candidate.activations += activations[segment.clusters.members[p]] / candidate.size;
    holds[segment.placement.drive[p]] = true;
  }
  const auto holders = static_cast<double>(std::count(holds.begin(), holds.end(), true));
  for (size_t d = 0; d < drives.size(); ++d) {
    if (!holds[d]) continue;
    candidate.t_base += drives[d].model.t_base / holders;
    candidate.t_transfer +=
        drives[d].model.t_transfer * static_cast<double>(segment.entry_bytes) / holders;
  }
  return candidate;
}

}  // namespace

std::unique_ptr<TierScore> make_tier_score(const std::string& name) {
  return registry().make(name);
}

void InitialFill::check(int64_t entries) const {
  const auto fail = [](const std::string& message) {
    throw Error(ErrorKind::kArgument, "the profile of a segment " + message);
  };
  if (static_cast<int64_t>(activations.size()) != entries) {
    fail("counts activations of " + std::to_string(activations.size()) + " entries, but " +
         std::to_string(entries) + " are written");
  }
  if (queries < 1) {
    fail("needs at least one query: `profile_queries` is " + std::to_string(queries));
  }
  for (size_t entry = 0; entry < activations.size(); ++entry) {
    if (activations[entry] < 0 || activations[entry] > queries) {
      fail("says that entry " + std::to_string(entry) + " was activated " +
           std::to_string(activations[entry]) + " times by " + std::to_string(queries) +
           " queries");
    }
  }
}

std::vector<int32_t> tier_order(const Segment& segment, std::span<const int32_t> activations,
                                const std::vector<DriveShape>& drives, const TierScore& score) {
  const Clusters& clusters = segment.clusters;
  std::vector<int32_t> begin(clusters.offsets.begin(), clusters.offsets.end() - 1);
  begin.resize(clusters.count() + clusters.loose() + 1);
  std::iota(begin.begin() + clusters.count(), begin.end(), clusters.offsets.back());
  std::vector<double> scores;
  for (size_t i = 0; i + 1 < begin.size(); ++i) {
    scores.push_back(
        score.score(candidate_of(segment, begin[i], begin[i + 1], activations, drives)));
  }
  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return scores[a] > scores[b]; });
  std::vector<int32_t> entries;
  entries.reserve(segment.entries);
  std::vector<bool> taken(segment.entries);
  for (const int32_t i : order) {
    for (int32_t p = begin[i]; p < begin[i + 1]; ++p) {
      const int32_t entry = clusters.members[p];
      if (!taken[entry]) entries.push_back(entry);
      taken[entry] = true;
    }
  }
  return entries;
}

}  // namespace swarm_kv
