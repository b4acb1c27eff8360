#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/clusters.h"

namespace swarm_kv {

// From an entry to its copies: 4 bytes per copy, and 4 per entry where some have several.
class RoutingTable {
 public:
  // Throws Error(kArgument) unless every member is an entry in [0, num_entries), no cluster is
  // empty or holds an entry twice, and every entry is in a cluster or, once and in no cluster,
  // loose.
  RoutingTable(const Clusters& clusters, int64_t num_entries);

  int64_t num_entries() const { return num_entries_; }

  // Member positions of the entry's copies, ascending: indices into Clusters::members and the lists
  // of Placement. Throws Error(kArgument) if `entry` is not in [0, num_entries).
  std::span<const int32_t> copies_of(int64_t entry) const;

  // Memory held, in bytes.
  size_t bytes() const;

 private:
  int64_t num_entries_;
  std::vector<int32_t> offsets_;  // per entry, and one more; empty where each has one copy
  std::vector<int32_t> positions_;
};

}  // namespace swarm_kv
