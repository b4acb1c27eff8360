#pragma once

#include <memory>
#include <shared_mutex>
#include <vector>

#include "io/block_device.h"
#include "io/engine.h"
#include "io/transfer.h"

namespace swarm_kv::io {

// A drive in memory: for tests, and for stores that fit. Its transfers complete inside submit().
class MemoryDevice : public BlockDevice {
 public:
  explicit MemoryDevice(const DeviceOptions& options);
  std::string_view engine() const override { return "memory"; }
  TransferQueue& queue() override { return queue_; }

  // Copies the rest of the transfer; the result is what completed() expects.
  int64_t copy(Transfer& transfer);

 protected:
  uint64_t reserve_impl(uint64_t bytes) override;
  void flush_impl() override {}

 private:
  class Queue : public TransferQueue {
   public:
    void submit(QueueShare& share) override;
    void progress(QueueShare&) override {}
    void wait(QueueShare& share, uint32_t open, Clock::time_point deadline) override {
      share.batch->wait(open, deadline);
    }
    void cancel(QueueShare&) override {}
  };

  struct FreeDeleter {
    void operator()(std::byte* memory) const;
  };

  Queue queue_;
  std::shared_mutex mutex_;  // shared: transfers, exclusive: growth
  std::vector<std::unique_ptr<std::byte[], FreeDeleter>> chunks_;
};

EngineResult open_memory(const DeviceOptions& options, EngineContext& context);

}  // namespace swarm_kv::io
