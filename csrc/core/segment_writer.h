#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/arena.h"
#include "core/entry_pool.h"
#include "core/entry_source.h"
#include "core/segment.h"
#include "io/block_device.h"

namespace swarm_kv {

// Writes all copies of a segment's entries in few large writes per drive, through staging memory
// and the segment's codec, and records the checksum of each entry as stored. The segment's extents
// must be allocated. Throws Error(kStorage) when a drive fails and Error(kArgument) for numbers
// that the codec refuses; what the extents then hold is undefined.
void write_segment(Segment& segment, const EntrySource& source,
                   const std::vector<std::shared_ptr<io::BlockDevice>>& drives, Arena& arena,
                   const std::shared_ptr<Region>& region);

}  // namespace swarm_kv
