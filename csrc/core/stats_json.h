#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/budget.h"
#include "core/cluster_cache.h"
#include "core/coalesce.h"
#include "core/device_tier.h"
#include "core/drive_load.h"
#include "core/entry_pool.h"
#include "core/traffic.h"
#include "io/block_device.h"

namespace swarm_kv {

// What a store holds at the moment.
struct Holdings {
  uint64_t allocated_bytes;  // on the drives
  uint64_t tickets;          // outstanding fetches
  uint64_t staged_bytes;     // of the staging memory, by those
};

// The store's counters as one JSON object: what is stored and, as `padding_bytes`, what the drives
// hold beyond it; `tickets`; `dram` by use; `hbm`, the same of the device, all 0 without one, with
// `hits`, the entries that its cluster cache served; `reuse` as in reuse_distance.h; traffic by
// purpose; and one object per drive with its engine, device model and counters (`decode_*`: reads
// of decoding steps, also those that were read ahead; `slowness`: how many times slower than its
// model it is taken to be).
std::string stats_json(const Traffic& traffic, const Budget& budget, const EntryPool& pool,
                       const ClusterCache& cache, const Holdings& holdings,
                       const DeviceTier* device,
                       const std::vector<std::shared_ptr<io::BlockDevice>>& drives,
                       const std::vector<DriveShape>& shapes, const DriveLoad& load);

}  // namespace swarm_kv
