#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/clusters.h"

namespace swarm_kv {

// Where one copy of an entry lies.
struct Copy {
  int32_t cluster;
  int32_t drive;
  int64_t byte_offset;  // within this segment's extent on that drive
};

struct Placement {
  std::vector<int32_t> start_drive;  // per cluster: the drive of its medoid
  std::vector<Copy> copies;          // per member position, in the order of Clusters::members
  std::vector<int64_t> drive_bytes;  // per drive: bytes of this segment's extent
};

// Distributes the members of `clusters` over `drives`. Per drive, the members of one cluster are
// contiguous (its share) and clusters follow one another in order. Entries of `entry_bytes` are
// packed without padding: readers round out to blocks, so alignment costs no storage.
//
// Strategies:
//   round_robin  member j goes to drive (start + j) mod drives, where start = p_global mod drives;
//                then p_global += |C| (arXiv 2603.17803, Eq. 7)
//   fixed_start  as round_robin, but start is always drive 0
//   sequential   a whole cluster on one drive, drives in turn: p_global counts clusters
//
// p_global carries the turn over from one layer or segment to the next; begin with 0. It changes
// only on success. Throws Error(kArgument) on entry_bytes, drives or p_global outside their limits,
// or an unknown strategy (the message lists the known ones).
Placement place(const Clusters& clusters, int64_t entry_bytes, int64_t drives,
                const std::string& strategy_name, int64_t& p_global);

// Names that place accepts.
std::vector<std::string> placement_names();

}  // namespace swarm_kv
