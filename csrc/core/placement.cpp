#include "core/placement.h"

#include <algorithm>
#include <limits>
#include <memory>

#include "core/registry.h"
#include "io/error.h"

namespace swarm_kv {
namespace {

// One way to spread clusters over drives.
class PlacementStrategy {
 public:
  virtual ~PlacementStrategy() = default;
  virtual int64_t start(int64_t p_global, int64_t drives) const = 0;
  virtual int64_t drive(int64_t start, int64_t member, int64_t drives) const = 0;
  virtual int64_t advance(int64_t p_global, int64_t cluster_size) const = 0;
};

class RoundRobin : public PlacementStrategy {
 public:
  int64_t start(int64_t p_global, int64_t drives) const override { return p_global % drives; }
  int64_t drive(int64_t start, int64_t member, int64_t drives) const override {
    return (start + member) % drives;
  }
  int64_t advance(int64_t p_global, int64_t cluster_size) const override {
    return p_global + cluster_size;
  }
};

class FixedStart final : public RoundRobin {
 public:
  int64_t start(int64_t, int64_t) const override { return 0; }
};

class Sequential final : public PlacementStrategy {
 public:
  int64_t start(int64_t p_global, int64_t drives) const override { return p_global % drives; }
  int64_t drive(int64_t start, int64_t, int64_t) const override { return start; }
  int64_t advance(int64_t p_global, int64_t) const override { return p_global + 1; }
};

const Registry<PlacementStrategy>& registry() {
  static const Registry<PlacementStrategy> kRegistry(
      "placement", {registered<PlacementStrategy, RoundRobin>("round_robin"),
                    registered<PlacementStrategy, FixedStart>("fixed_start"),
                    registered<PlacementStrategy, Sequential>("sequential")});
  return kRegistry;
}

[[noreturn]] void fail(const std::string& message) {
  throw Error(ErrorKind::kArgument, "place: " + message);
}

void check(const Clusters& clusters, int64_t entry_bytes, int64_t drives, int64_t p_global) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  const int64_t members = static_cast<int64_t>(clusters.members.size());
  if (clusters.offsets.empty() || clusters.offsets.front() != 0 ||
      clusters.offsets.back() != members ||
      !std::is_sorted(clusters.offsets.begin(), clusters.offsets.end())) {
    fail("cluster offsets must ascend from 0 to the number of members, " + std::to_string(members));
  }
  if (drives < 1 || drives > kMax) {
    fail("drives must be in [1, 2^31), got " + std::to_string(drives));
  }
  if (clusters.count() > kMax) {
    fail("at most 2^31 - 1 clusters fit, got " + std::to_string(clusters.count()));
  }
  if (entry_bytes < 1 ||
      (members > 0 && entry_bytes > std::numeric_limits<int64_t>::max() / members)) {
    fail("entry_bytes must be at least 1 and its sum over all copies must fit in 63 bits, got " +
         std::to_string(entry_bytes));
  }
  if (p_global < 0 || p_global > std::numeric_limits<int64_t>::max() - members) {
    fail("p_global must be at least 0 and must not overflow, got " + std::to_string(p_global));
  }
}

}  // namespace

std::vector<std::string> placement_names() { return registry().names(); }

Placement place(const Clusters& clusters, int64_t entry_bytes, int64_t drives,
                const std::string& strategy_name, int64_t& p_global) {
  const std::unique_ptr<PlacementStrategy> strategy = registry().make(strategy_name);
  check(clusters, entry_bytes, drives, p_global);

  Placement placement;
  placement.start_drive.reserve(clusters.count());
  placement.copies.reserve(clusters.members.size());
  placement.drive_bytes.assign(drives, 0);
  int64_t next = p_global;
  for (int64_t c = 0; c < clusters.count(); ++c) {
    const int64_t start = strategy->start(next, drives);
    placement.start_drive.push_back(static_cast<int32_t>(start));
    for (int64_t member = 0; member < clusters.size(c); ++member) {
      const int64_t drive = strategy->drive(start, member, drives);
      placement.copies.push_back(
          {static_cast<int32_t>(c), static_cast<int32_t>(drive), placement.drive_bytes[drive]});
      placement.drive_bytes[drive] += entry_bytes;
    }
    next = strategy->advance(next, clusters.size(c));
  }
  p_global = next;
  return placement;
}

}  // namespace swarm_kv
