#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "io/block_device.h"
#include "io/device_model.h"

namespace swarm_kv::io {

struct DeviceOptions {
  // A directory: an ephemeral file (mode 0600, unlinked at once, so that a killed process leaks
  // nothing) is made there. "raw:/path": an existing regular file or block device is used in place,
  // never created, truncated or unlinked. Unused by the engines "memory" and "simulated".
  std::string path;
  // One of engine_names(), or auto: io_uring, else threads. gds: as auto where cuFile does not
  // work.
  std::string engine = "auto";
  bool direct = true;          // bypass the page cache where a probe shows that it works
  bool read_only = false;      // raw paths only
  uint32_t queue_depth = 128;  // requests in flight on this drive, 1..4096
  uint32_t threads = 8;        // engines "threads" and "gds": transfers at once, 1..256
  std::chrono::milliseconds timeout{30000};  // of the blocking calls
  std::string label;            // name in messages; default: path, or engine and position
  uint32_t block = 0;           // bytes, power of two; 0: the drive's own. Larger than it: allowed
  uint64_t capacity_limit = 0;  // bytes that reserve() may reach; 0: no limit
  DeviceModel model{9e-5, 1.5e-10};  // engine "simulated"
};

// Engines that DeviceOptions::engine may name.
std::vector<std::string_view> engine_names();

// Opens all drives, in order. Drives of one call share a ring (io_uring) if `shared_ring`, and a
// virtual clock (simulated). One ring is the default: buffers are
// registered, and counted against the memlock limit, once, and it takes less CPU per request than a
// ring each (rings_bench; medians on a busy 2-core machine: 30 % less on eight memory-backed
// stand-in drives, 9 % less with all eight on one disk, where a ring each gave 8 % more requests
// per second). Throws kArgument for options
// outside their limits and kStorage for paths that cannot be used, before any of the returned
// drives exists.
std::vector<std::shared_ptr<BlockDevice>> open_devices(const std::vector<DeviceOptions>& options,
                                                       bool shared_ring = true);

}  // namespace swarm_kv::io
