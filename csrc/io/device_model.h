#pragma once

#include <cstdint>

namespace swarm_kv::io {

class BlockDevice;

// What a drive's requests cost: seconds = requests * t_base + bytes * t_transfer, with enough
// requests in the queue to keep the drive busy (T_base and T_transfer of arXiv 2603.17803).
struct DeviceModel {
  double t_base = 0;      // seconds per request
  double t_transfer = 0;  // seconds per byte

  double seconds(uint64_t requests, uint64_t bytes) const {
    return static_cast<double>(requests) * t_base + static_cast<double>(bytes) * t_transfer;
  }
};

struct ProbeOptions {
  uint64_t scratch_offset = 0;        // multiple of the device's block
  uint64_t scratch_bytes = 4U << 20;  // read by the probe; must be reserved
  bool write_scratch = true;          // overwrite the scratch range first; false leaves data alone
  uint32_t small_bytes = 4096;        // rounded up to a block
  uint32_t large_bytes = 256U << 10;
  uint32_t rounds = 3;  // the fastest round of each size counts
};

// Measures reads at depth in well under a second. Simulated drives return their exact model without
// any I/O. Both figures of the result are positive. Throws kArgument when the scratch range does
// not fit capacity(), kStorage when a transfer fails.
DeviceModel measure_device(BlockDevice& device, const ProbeOptions& options = {});

}  // namespace swarm_kv::io
