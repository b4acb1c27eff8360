#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/arena.h"
#include "core/entry_pool.h"
#include "core/segment.h"
#include "io/block_device.h"

namespace swarm_kv {

// Where the keys and values of a segment's entries lie in the caller's memory: head h of entry n
// starts `h * head_stride + n * entry_stride` bytes after the base, `head_bytes` long.
struct EntrySource {
  struct Half {
    const std::byte* base;
    int64_t head_stride;
    int64_t entry_stride;
  };
  Half keys;
  Half values;
  int64_t heads;
  int64_t head_bytes;

  int64_t entry_bytes() const { return 2 * heads * head_bytes; }
  // Writes entry `n` as [K of all heads | V of all heads].
  void assemble(int64_t n, std::byte* out) const;
};

// Writes all copies of a segment's entries in few large writes per drive, through staging memory,
// and records each entry's checksum. The segment's extents must be allocated. Throws
// Error(kStorage) when a drive fails; what the extents then hold is undefined.
void write_segment(Segment& segment, const EntrySource& source,
                   const std::vector<std::shared_ptr<io::BlockDevice>>& drives, Arena& arena,
                   const std::shared_ptr<Region>& region);

}  // namespace swarm_kv
