#pragma once

#include <memory>

#include "io/block_device.h"
#include "io/drive_file.h"
#include "io/engine.h"
#include "io/transfer.h"

namespace swarm_kv::io {

// A file or block device read and written by threads of its own with pread and pwrite: where
// io_uring is not allowed.
class ThreadDevice : public BlockDevice {
 public:
  ThreadDevice(const DeviceOptions& options, std::unique_ptr<DriveFile> file);
  ~ThreadDevice() override;

  std::string_view engine() const override { return "threads"; }
  TransferQueue& queue() override;

 protected:
  uint64_t reserve_impl(uint64_t bytes) override;
  void flush_impl() override { file_->flush(); }

 private:
  class Pool;
  const std::shared_ptr<DriveFile> file_;
  std::unique_ptr<Pool> pool_;
};

EngineResult open_threads(const DeviceOptions& options, EngineContext& context);

}  // namespace swarm_kv::io
