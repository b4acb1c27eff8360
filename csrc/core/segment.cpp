#include "core/segment.h"

#include <numeric>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace swarm_kv {

uint32_t checksum_of(const std::byte* data, int64_t bytes) {
  return static_cast<uint32_t>(XXH3_64bits(data, bytes));
}

uint64_t Segment::index_bytes() const {
  const auto bytes = [](const auto& v) { return v.size() * sizeof(v[0]); };
  // The list of cached entries grows with the cache; its largest size is charged from the start.
  return bytes(clusters.offsets) + bytes(clusters.members) + bytes(placement.start_drive) +
         bytes(placement.copies) + bytes(placement.drive_bytes) + routing.bytes() +
         bytes(checksum) + bytes(residency.slot) + bytes(residency.heat) + bytes(residency.pinned) +
         entries * sizeof(int32_t);
}

uint64_t Segment::stored_bytes() const {
  return std::accumulate(placement.drive_bytes.begin(), placement.drive_bytes.end(), uint64_t{0});
}

}  // namespace swarm_kv
