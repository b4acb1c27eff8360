#include "core/segment.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace swarm_kv {

uint32_t checksum_of(const std::byte* data, int64_t bytes) {
  return static_cast<uint32_t>(XXH3_64bits(data, bytes));
}

uint64_t Residency::bytes() const {
  return slot.capacity() * sizeof(slot[0]) + (policy ? policy->bytes() : 0) +
         (sample ? sample->bytes() : 0);
}

uint64_t Segment::index_bytes() const {
  const auto bytes = [](const auto& v) { return v.capacity() * sizeof(v[0]); };
  return bytes(clusters.offsets) + bytes(clusters.members) + bytes(placement.drive) +
         bytes(placement.slot) + bytes(placement.drive_entries) + routing.bytes() +
         bytes(checksum) + residency.bytes() + on_device.bytes() + (codec ? codec->bytes() : 0);
}

}  // namespace swarm_kv
