#include "io/memory_device.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

#include "io/error.h"

namespace swarm_kv::io {
namespace {

constexpr uint64_t kChunk = 4U << 20;  // bytes

}  // namespace

void MemoryDevice::FreeDeleter::operator()(std::byte* memory) const { std::free(memory); }

MemoryDevice::MemoryDevice(const DeviceOptions& options)
    : BlockDevice({.name = options.label,
                   .geometry = {.block = options.block == 0 ? 512 : options.block},
                   .timeout = options.timeout,
                   .capacity_limit = options.capacity_limit}) {}

uint64_t MemoryDevice::reserve_impl(uint64_t bytes) {
  const uint64_t wanted = (bytes + kChunk - 1) / kChunk;
  std::unique_lock lock(mutex_);
  const std::size_t before = chunks_.size();
  while (chunks_.size() < wanted) {
    // calloc: pages that were never written cost nothing.
    auto* chunk = static_cast<std::byte*>(std::calloc(kChunk, 1));
    if (chunk == nullptr) {
      chunks_.resize(before);
      throw Error(ErrorKind::kStorage, "drive '" + name() + "': no memory for " +
                                           std::to_string(bytes) + " bytes, " +
                                           std::to_string(capacity()) + " are reserved");
    }
    chunks_.emplace_back(chunk);
  }
  return bytes;
}

int64_t MemoryDevice::copy(Transfer& transfer) {
  std::shared_lock lock(mutex_);
  uint64_t offset = transfer.rest_offset();
  std::byte* data = transfer.rest_data();
  uint64_t left = transfer.rest_length();
  while (left > 0) {
    const uint64_t inside = offset % kChunk;
    const uint64_t part = std::min(left, kChunk - inside);
    std::byte* stored = chunks_[offset / kChunk].get() + inside;
    if (transfer.kind == OpKind::kRead) {
      std::memcpy(data, stored, part);
    } else {
      std::memcpy(stored, data, part);
    }
    offset += part;
    data += part;
    left -= part;
  }
  return transfer.rest_length();
}

void MemoryDevice::Queue::submit(QueueShare& share) {
  for (Transfer* transfer : share.transfers) {
    auto& device = static_cast<MemoryDevice&>(*transfer->device);
    device.completed(*transfer, device.copy(*transfer), now_ns());
  }
  const auto last = share.batch->finish(share, static_cast<uint32_t>(share.transfers.size()));
}

EngineResult open_memory(const DeviceOptions& options, EngineContext&) {
  return std::make_shared<MemoryDevice>(options);
}

}  // namespace swarm_kv::io
