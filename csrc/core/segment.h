#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/clusters.h"
#include "core/placement.h"
#include "core/routing_table.h"

namespace swarm_kv {

// What the cluster cache knows about one segment's entries.
struct Residency {
  std::vector<int32_t> slot;     // per entry: cache slot index, or -1
  std::vector<float> heat;       // per entry: the cache policy's score, higher stays longer
  std::vector<int32_t> cached;   // the entries that have a slot, in no order
  std::vector<uint16_t> pinned;  // per entry: fetches that still point at the cached copy
  float step = 1.0f;             // the policy's own clock
};

// Entries of one layer of one sequence that lie on the drives: written once, then immutable.
struct Segment {
  int64_t id = 0;
  std::string label;  // names the segment in errors, as in "layer 3 of sequence 0"
  int64_t entries = 0;
  int64_t entry_bytes = 0;
  Clusters clusters;
  Placement placement;
  RoutingTable routing;
  std::vector<uint64_t> drive_offset;  // per drive: where this segment's extent begins
  std::vector<uint32_t> checksum;      // per entry: low half of XXH3 over its bytes
  Residency residency;

  // Address of one copy on its drive.
  uint64_t offset_of(int64_t member_position) const {
    const Copy& copy = placement.copies[member_position];
    return drive_offset[copy.drive] + copy.byte_offset;
  }
  // Fast memory that holding this segment takes, in bytes (its entries on the drives not counted).
  uint64_t index_bytes() const;
  // Bytes on the drives, copies included.
  uint64_t stored_bytes() const;
};

// Low 32 bits of XXH3-64.
uint32_t checksum_of(const std::byte* data, int64_t bytes);

}  // namespace swarm_kv
