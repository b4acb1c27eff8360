#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/clusters.h"
#include "core/placement.h"

namespace swarm_kv {

// From an entry to its copies, in compressed rows: 4 bytes per entry and per copy.
class RoutingTable {
 public:
  // Throws Error(kArgument) unless the clusters and the placement describe the same copies: member
  // positions and copies match one to one, every member is an entry in [0, num_entries), every
  // entry has a copy, no cluster holds an entry twice, and each copy names the cluster it is in and
  // a drive of the placement.
  RoutingTable(const Clusters& clusters, const Placement& placement, int64_t num_entries);

  int64_t num_entries() const { return static_cast<int64_t>(offsets_.size()) - 1; }

  // Member positions of the entry's copies, ascending: indices into Clusters::members and
  // Placement::copies. Throws Error(kArgument) if `entry` is not in [0, num_entries).
  std::span<const int32_t> copies_of(int64_t entry) const;

  // Memory held, in bytes.
  size_t bytes() const;

 private:
  std::vector<int32_t> offsets_;
  std::vector<int32_t> positions_;
};

}  // namespace swarm_kv
