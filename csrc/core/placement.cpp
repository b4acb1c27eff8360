#include "core/placement.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>

#include "core/registry.h"
#include "io/error.h"

namespace swarm_kv {
namespace {

using Drives = std::span<uint8_t>;  // of some members, to be filled in

// One way to spread members over drives.
class PlacementStrategy {
 public:
  virtual ~PlacementStrategy() = default;
  virtual void place_cluster(Drives members, std::span<const double> weights, Turn& turn) const = 0;
  virtual void place_run(Drives members, std::span<const double> weights, Turn& turn) const {
    std::fill(members.begin(), members.end(), static_cast<uint8_t>(turn.next % weights.size()));
    ++turn.next;
  }
  virtual bool keeps_clusters_whole() const { return false; }
  virtual bool starts_anywhere() const { return false; }
};

void stripe(Drives members, size_t start, size_t drives) {
  for (size_t j = 0; j < members.size(); ++j) {
    members[j] = static_cast<uint8_t>((start + j) % drives);
  }
}

class RoundRobin final : public PlacementStrategy {
 public:
  void place_cluster(Drives members, std::span<const double> weights, Turn& turn) const override {
    stripe(members, turn.next % weights.size(), weights.size());
    turn.next += static_cast<int64_t>(members.size());
  }
  bool starts_anywhere() const override { return true; }
};

class FixedStart final : public PlacementStrategy {
 public:
  void place_cluster(Drives members, std::span<const double> weights, Turn&) const override {
    stripe(members, 0, weights.size());
  }
};

class Sequential final : public PlacementStrategy {
 public:
  void place_cluster(Drives members, std::span<const double> weights, Turn& turn) const override {
    place_run(members, weights, turn);
  }
  bool keeps_clusters_whole() const override { return true; }
  bool starts_anywhere() const override { return true; }
};

// Smooth weighted round robin, in whole numbers so that equal weights never drift apart.
class Weighted final : public PlacementStrategy {
 public:
  void place_cluster(Drives members, std::span<const double> weights, Turn& turn) const override {
    const std::vector<int64_t> parts = parts_of(weights);
    for (uint8_t& drive : members) drive = take(1, parts, turn);
  }
  void place_run(Drives members, std::span<const double> weights, Turn& turn) const override {
    const uint8_t drive = take(static_cast<int64_t>(members.size()), parts_of(weights), turn);
    std::fill(members.begin(), members.end(), drive);
  }

 private:
  static constexpr double kLargestPart = 1 << 20;

  static std::vector<int64_t> parts_of(std::span<const double> weights) {
    const double largest = *std::max_element(weights.begin(), weights.end());
    std::vector<int64_t> parts;
    for (const double weight : weights) {
      parts.push_back(std::max<int64_t>(1, std::llround(weight / largest * kLargestPart)));
    }
    return parts;
  }

  static uint8_t take(int64_t entries, const std::vector<int64_t>& parts, Turn& turn) {
    if (turn.credit.size() != parts.size()) turn.credit.assign(parts.size(), 0);
    for (size_t d = 0; d < parts.size(); ++d) turn.credit[d] += entries * parts[d];
    const auto furthest = std::max_element(turn.credit.begin(), turn.credit.end());
    *furthest -= entries * std::accumulate(parts.begin(), parts.end(), int64_t{0});
    return static_cast<uint8_t>(furthest - turn.credit.begin());
  }
};

const Registry<PlacementStrategy>& registry() {
  static const Registry<PlacementStrategy> kRegistry(
      "placement", {registered<PlacementStrategy, RoundRobin>("round_robin"),
                    registered<PlacementStrategy, FixedStart>("fixed_start"),
                    registered<PlacementStrategy, Sequential>("sequential"),
                    registered<PlacementStrategy, Weighted>("weighted")});
  return kRegistry;
}

[[noreturn]] void fail(const std::string& message) {
  throw Error(ErrorKind::kArgument, "place: " + message);
}

void check(const Clusters& clusters, std::span<const double> weights, const Turn& turn,
           std::span<const int32_t> starts) {
  const auto members = static_cast<int64_t>(clusters.members.size());
  if (clusters.offsets.empty() || clusters.offsets.front() != 0 ||
      clusters.offsets.back() > members ||
      !std::is_sorted(clusters.offsets.begin(), clusters.offsets.end())) {
    fail("cluster offsets must ascend from 0 to at most the number of members, " +
         std::to_string(members));
  }
  if (members > std::numeric_limits<int32_t>::max()) {
    fail("at most 2^31 - 1 copies fit, got " + std::to_string(members));
  }
  if (weights.empty() || weights.size() > kMaxDrives) {
    fail("drives must be in [1, " + std::to_string(kMaxDrives) + "], got " +
         std::to_string(weights.size()));
  }
  for (size_t d = 0; d < weights.size(); ++d) {
    if (!(weights[d] > 0) || !std::isfinite(weights[d])) {
      fail("the weight of drive " + std::to_string(d) + " must be positive and finite, got " +
           std::to_string(weights[d]));
    }
  }
  if (!starts.empty() && std::ssize(starts) != clusters.count()) {
    fail("starts must be one per cluster, " + std::to_string(clusters.count()) + ", got " +
         std::to_string(starts.size()));
  }
  for (const int32_t start : starts) {
    if (start < -1 || start >= std::ssize(weights)) {
      fail("a start must be a drive in [0, " + std::to_string(weights.size()) +
           "), or -1 for none, got " + std::to_string(start));
    }
  }
  if (turn.next < 0 || turn.next > std::numeric_limits<int64_t>::max() - members) {
    fail("p_global must be at least 0 and must not overflow, got " + std::to_string(turn.next));
  }
}

// Two neighbours are no stretch: clusters of co-activated entries often hold just those.
bool in_token_order(const Clusters& clusters, int64_t cluster) {
  const auto first = clusters.members.begin() + clusters.offsets[cluster];
  const auto last = clusters.members.begin() + clusters.offsets[cluster + 1];
  const auto no_successor = [](int32_t a, int32_t b) { return int64_t{b} != int64_t{a} + 1; };
  return last - first > 2 && std::adjacent_find(first, last, no_successor) == last;
}

}  // namespace

std::vector<std::string> placement_names() { return registry().names(); }

Placement place(const Clusters& clusters, std::span<const double> weights,
                const std::string& strategy_name, Turn& turn, std::span<const int32_t> starts) {
  const std::unique_ptr<PlacementStrategy> strategy = registry().make(strategy_name);
  check(clusters, weights, turn, starts);

  Placement placement;
  placement.drive.resize(clusters.members.size());
  Turn next = turn;
  const Drives drives(placement.drive);
  const auto place_runs = [&](Drives members) {
    for (size_t at = 0; at < members.size(); at += kRun) {
      strategy->place_run(members.subspan(at, std::min<size_t>(kRun, members.size() - at)), weights,
                          next);
    }
  };
  for (int64_t c = 0; c < clusters.count(); ++c) {
    const Drives members = drives.subspan(clusters.offsets[c], clusters.size(c));
    if (!starts.empty() && starts[c] >= 0 && strategy->starts_anywhere()) {
      Turn own{.next = starts[c], .credit = {}};
      strategy->place_cluster(members, weights, own);
    } else if (!strategy->keeps_clusters_whole() && in_token_order(clusters, c)) {
      place_runs(members);
    } else {
      strategy->place_cluster(members, weights, next);
    }
  }
  place_runs(drives.subspan(clusters.offsets.back()));

  placement.slot.reserve(placement.drive.size());
  placement.drive_entries.assign(weights.size(), 0);
  for (const uint8_t drive : placement.drive) {
    placement.slot.push_back(static_cast<uint32_t>(placement.drive_entries[drive]++));
  }
  turn = std::move(next);
  return placement;
}

}  // namespace swarm_kv
