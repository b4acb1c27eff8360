#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/budget.h"
#include "core/coalesce.h"
#include "core/drive_load.h"
#include "core/entry_pool.h"
#include "core/traffic.h"
#include "io/block_device.h"

namespace swarm_kv {

// The store's counters as one JSON object: what is stored and, as `padding_bytes`, what the drives'
// `allocated_bytes` hold beyond it; `dram` by use, with the `staged_bytes` of the staging
// memory that reads hold; traffic by purpose; and one object per drive with its engine, device
// model and counters (`decode_*`: reads of decoding steps, also those that were read ahead;
// `slowness`: how many times slower than its model it is taken to be).
std::string stats_json(const Traffic& traffic, const Budget& budget, const EntryPool& pool,
                       int64_t cached_entries, uint64_t staged_bytes, uint64_t allocated_bytes,
                       const std::vector<std::shared_ptr<io::BlockDevice>>& drives,
                       const std::vector<DriveShape>& shapes, const DriveLoad& load);

}  // namespace swarm_kv
