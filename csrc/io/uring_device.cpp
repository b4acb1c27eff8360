#include "io/uring_device.h"

#include <utility>

namespace swarm_kv::io {

UringDevice::UringDevice(const DeviceOptions& options, std::unique_ptr<DriveFile> file,
                         std::shared_ptr<UringQueue> ring)
    : BlockDevice({.name = options.label,
                   .geometry = file->geometry(),
                   .timeout = options.timeout,
                   .capacity_limit = options.capacity_limit,
                   .capacity = file->capacity(),
                   .notes = file->notes()}),
      file_(std::move(file)),
      ring_(std::move(ring)),
      lane_(ring_->add_lane(file_->fd(), options.queue_depth)) {}

UringDevice::~UringDevice() {
  if (in_owner_process()) ring_->remove_lane(lane_);
}

uint64_t UringDevice::reserve_impl(uint64_t bytes) {
  std::string degradation;
  const uint64_t reserved = file_->reserve(bytes, capacity(), &degradation);
  if (!degradation.empty()) note(degradation);
  return reserved;
}

bool UringDevice::register_buffer_impl(std::span<std::byte> region) {
  const std::string reason = ring_->register_region(region);
  if (reason.empty()) return true;
  note(reason);
  return false;
}

void UringDevice::unregister_buffer_impl(std::span<std::byte> region) {
  ring_->unregister_region(region);
}

EngineResult open_uring(const DeviceOptions& options, EngineContext& context) {
  auto file = std::make_unique<DriveFile>(options);
  auto ring = std::static_pointer_cast<UringQueue>(context.shared);
  if (ring == nullptr) {
    ring = context.shared_ring ? std::make_shared<UringQueue>(
                                     context.total_depth, static_cast<uint32_t>(context.devices))
                               : std::make_shared<UringQueue>(options.queue_depth, 1);
    if (context.shared_ring) context.shared = ring;
  }
  return std::make_shared<UringDevice>(options, std::move(file), std::move(ring));
}

}  // namespace swarm_kv::io
