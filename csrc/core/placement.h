#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/clusters.h"

namespace swarm_kv {

// Entries in token order go to one drive this many at a time, so that neighbours which are read one
// by one still merge into one request.
inline constexpr int64_t kRun = 16;

// A drive is named by a byte.
inline constexpr int64_t kMaxDrives = 255;

// Where the copies of a segment's entries lie: 5 bytes per copy. A drive holds its copies one after
// another, so the slot of a copy is its rank there and its byte offset is slot * entry_bytes.
struct Placement {
  std::vector<uint8_t> drive;          // per member position
  std::vector<uint32_t> slot;          // per member position: rank among the drive's copies
  std::vector<int64_t> drive_entries;  // per drive: copies of this segment
};

// Whose turn it is; carried over from one layer or segment to the next. Begin with Turn{}.
struct Turn {
  int64_t next = 0;             // p_global of arXiv 2603.17803, Eq. 7
  std::vector<int64_t> credit;  // per drive: what "weighted" owes it; empty before the first time
};

// Distributes the members of `clusters` over the drives, one per weight. Per drive, the members of
// one cluster are contiguous (its share) and clusters follow one another in order. Copies are
// packed without padding: readers round out to blocks, so alignment costs no storage.
//
// `weights` say how fast each drive is, in any unit; only "weighted" looks at them. Strategies:
//   round_robin  member j goes to drive (start + j) mod drives, where start = p_global mod drives;
//                then p_global += |C| (Eq. 7)
//   fixed_start  as round_robin, but start is always drive 0
//   sequential   a whole cluster on one drive, drives in turn: p_global counts clusters
//   weighted     each member to the drive that is furthest behind its part of the weights, so that
//                every stretch of members, across clusters too, is split in proportion to them;
//                equal weights give round_robin
// Loose entries are dealt in runs of kRun under every strategy: drives in turn, "weighted" by its
// own rule. So are the members of a cluster that is a stretch of the sequence (more than two
// members, each the successor of the one before); "sequential" keeps it whole.
//
// A cluster with starts[c] >= 0 is the further part of one that lies elsewhere: "round_robin" and
// "sequential" place it as if it were starts[c]'s turn (section 6.2: after the newest member), and
// p_global stays. The others keep their rule. An empty `starts` has none.
//
// `turn` changes only on success. Throws Error(kArgument) for offsets that do not ascend from 0 to
// at most the number of members, for a number of drives outside [1, kMaxDrives], a weight that is
// not positive and finite, `starts` that are not one per cluster or name a drive that does not
// exist, or an unknown strategy (the message lists the known ones).
Placement place(const Clusters& clusters, std::span<const double> weights,
                const std::string& strategy, Turn& turn, std::span<const int32_t> starts = {});

// Names that place accepts.
std::vector<std::string> placement_names();

}  // namespace swarm_kv
