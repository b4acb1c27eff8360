#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/cache_policy.h"
#include "core/clusters.h"
#include "core/codec.h"
#include "core/placement.h"
#include "core/reuse_distance.h"
#include "core/routing_table.h"

namespace swarm_kv {

// What a cluster cache knows about one segment's entries.
struct Residency {
  std::vector<int32_t> slot;  // per entry: cache slot index, or -1
  int64_t cached = 0;         // entries that have a slot
  std::unique_ptr<CachePolicy> policy = nullptr;
  std::optional<ReuseSample> sample = std::nullopt;

  uint64_t bytes() const;
};

// Entries of one layer of one sequence that lie on the drives: written once, then immutable.
struct Segment {
  int64_t id = 0;
  std::string label;  // names the segment in errors, as in "layer 3 of sequence 0"
  int64_t entries = 0;
  int64_t entry_bytes = 0;                 // of one entry on the drives
  std::unique_ptr<Codec> codec = nullptr;  // null: entries lie there as they are
  Clusters clusters;
  Placement placement;
  RoutingTable routing;
  std::vector<uint64_t> drive_offset;  // per drive: where this segment's extent begins
  std::vector<uint32_t> checksum;      // per entry: low half of XXH3 over it as stored
  Residency residency;                 // in the host's memory
  Residency on_device{};               // the same on the device, where the store has one

  // Address of one copy on its drive.
  uint64_t offset_of(int64_t member_position) const {
    return drive_offset[placement.drive[member_position]] +
           uint64_t{placement.slot[member_position]} * entry_bytes;
  }
  // Bytes of this segment's extent on a drive.
  uint64_t drive_bytes(size_t drive) const { return placement.drive_entries[drive] * entry_bytes; }
  // Host memory that holding this segment takes, in bytes: not its entries on the drives, nor what
  // the cluster cache counts with its slots.
  uint64_t index_bytes() const;
  // Entries on the drives, copies included.
  int64_t copies() const { return static_cast<int64_t>(clusters.members.size()); }
  uint64_t stored_bytes() const { return copies() * entry_bytes; }
};

// Low 32 bits of XXH3-64.
uint32_t checksum_of(const std::byte* data, int64_t bytes);

}  // namespace swarm_kv
