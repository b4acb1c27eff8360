#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/budget.h"
#include "core/cluster_cache.h"
#include "core/coalesce.h"
#include "core/entry_pool.h"
#include "core/traffic.h"
#include "io/block_device.h"

namespace swarm_kv {

// The store's counters as one JSON object: what is stored and, as `padding_bytes`, what the drives'
// `allocated_bytes` hold beyond it; `dram` by use, `reuse` as in reuse_distance.h, `traffic` by
// purpose, and one object per drive with its engine, device model and counters.
std::string stats_json(const Traffic& traffic, const Budget& budget, const EntryPool& pool,
                       const ClusterCache& cache, uint64_t allocated_bytes,
                       const std::vector<std::shared_ptr<io::BlockDevice>>& drives,
                       const std::vector<DriveShape>& shapes);

}  // namespace swarm_kv
