#pragma once

#include <memory>

#include "io/block_device.h"
#include "io/drive_file.h"
#include "io/engine.h"
#include "io/thread_queue.h"

namespace swarm_kv::io {

// A file or block device read and written by threads of its own: with pread and pwrite, where
// io_uring is not allowed, or with another engine's blocking calls.
class ThreadDevice : public BlockDevice {
 public:
  ThreadDevice(const DeviceOptions& options, std::shared_ptr<DriveFile> file,
               ThreadQueue::Move move);
  ~ThreadDevice() override;

  std::string_view engine() const override { return "threads"; }
  TransferQueue& queue() override { return queue_; }

 protected:
  uint64_t reserve_impl(uint64_t bytes) override;
  void flush_impl() override { file_->flush(); }

 private:
  const std::shared_ptr<DriveFile> file_;
  ThreadQueue queue_;
};

EngineResult open_threads(const DeviceOptions& options, EngineContext& context);

}  // namespace swarm_kv::io
