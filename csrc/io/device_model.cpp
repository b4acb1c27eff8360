#include "io/device_model.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "io/aligned_buffer.h"
#include "io/block_device.h"
#include "io/error.h"

namespace swarm_kv::io {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr uint32_t kMaxSmallReads = 256;
constexpr double kLeastBase = 1e-9;       // seconds per request
constexpr double kLeastTransfer = 1e-13;  // seconds per byte: 10 TB/s

// Seconds per read of `bytes`, with all reads of the scratch range that fit queued at once.
double seconds_per_read(BlockDevice& device, const ProbeOptions& options, uint32_t bytes,
                        std::byte* memory) {
  std::vector<uint64_t> offsets;
  for (uint64_t at = 0; at + bytes <= options.scratch_bytes; at += bytes) offsets.push_back(at);
  std::shuffle(offsets.begin(), offsets.end(), std::minstd_rand(1));
  if (offsets.size() > kMaxSmallReads) offsets.resize(kMaxSmallReads);
  double fastest = 0;
  for (uint32_t round = 0; round < std::max(1U, options.rounds); ++round) {
    Batch batch;
    for (const uint64_t at : offsets) {
      batch.add(device, OpKind::kRead, options.scratch_offset + at, memory + at, bytes);
    }
    const auto start = SteadyClock::now();
    batch.submit();
    batch.wait(device.timeout());
    const std::chrono::duration<double> taken = SteadyClock::now() - start;
    const double each = taken.count() / static_cast<double>(offsets.size());
    fastest = round == 0 ? each : std::min(fastest, each);
  }
  return fastest;
}

}  // namespace

DeviceModel measure_device(BlockDevice& device, const ProbeOptions& options) {
  if (const auto exact = device.exact_model()) return *exact;
  const uint64_t block = device.geometry().block;
  const auto whole_blocks = [&](uint32_t bytes) {
    return static_cast<uint32_t>((bytes + block - 1) / block * block);
  };
  const uint32_t small = whole_blocks(options.small_bytes);
  const uint32_t large = whole_blocks(options.large_bytes);
  if (small == 0 || large <= small || options.scratch_bytes < large ||
      options.scratch_bytes % block != 0) {
    throw Error(ErrorKind::kArgument,
                "measuring drive '" + device.name() + "' needs 0 < small_bytes (" +
                    std::to_string(small) + ") < large_bytes (" + std::to_string(large) +
                    ") <= scratch_bytes (" + std::to_string(options.scratch_bytes) +
                    "), all multiples of its block of " + std::to_string(block) + " bytes");
  }
  device.check_range(options.write_scratch ? OpKind::kWrite : OpKind::kRead, options.scratch_offset,
                     options.scratch_bytes);
  const auto memory = allocate_aligned(
      options.scratch_bytes, std::max<std::size_t>(4096, device.geometry().memory_alignment));
  if (options.write_scratch) {
    // Drives may answer reads of what was never written, or of zeros, without reading anything.
    std::minstd_rand random(7);
    for (uint64_t at = 0; at + sizeof(uint32_t) <= options.scratch_bytes; at += sizeof(uint32_t)) {
      const auto word = static_cast<uint32_t>(random());
      std::memcpy(memory.get() + at, &word, sizeof(word));
    }
    device.write(options.scratch_offset, {memory.get(), options.scratch_bytes});
  }
  const double small_seconds = seconds_per_read(device, options, small, memory.get());
  const double large_seconds = seconds_per_read(device, options, large, memory.get());
  // Two sizes, two unknowns; noise can push either below what is physical.
  DeviceModel model;
  model.t_transfer = std::max(kLeastTransfer, (large_seconds - small_seconds) / (large - small));
  model.t_base = std::max(kLeastBase, small_seconds - model.t_transfer * small);
  return model;
}

}  // namespace swarm_kv::io
