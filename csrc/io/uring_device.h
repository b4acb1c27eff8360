#pragma once

#include <memory>

#include "io/block_device.h"
#include "io/drive_file.h"
#include "io/engine.h"
#include "io/uring_queue.h"

namespace swarm_kv::io {

// A file or block device read and written through io_uring.
class UringDevice : public BlockDevice {
 public:
  UringDevice(const DeviceOptions& options, std::unique_ptr<DriveFile> file,
              std::shared_ptr<UringQueue> ring);
  ~UringDevice() override;

  std::string_view engine() const override { return "io_uring"; }
  TransferQueue& queue() override { return *ring_; }
  UringQueue::Lane& lane() { return *lane_; }

 protected:
  uint64_t reserve_impl(uint64_t bytes) override;
  void flush_impl() override { file_->flush(); }
  bool register_buffer_impl(std::span<std::byte> region) override;
  void unregister_buffer_impl(std::span<std::byte> region) override;

 private:
  const std::unique_ptr<DriveFile> file_;
  const std::shared_ptr<UringQueue> ring_;
  UringQueue::Lane* const lane_;
};

EngineResult open_uring(const DeviceOptions& options, EngineContext& context);

}  // namespace swarm_kv::io
