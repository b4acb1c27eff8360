#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "io/transfer.h"

namespace swarm_kv::io {

// Moves transfers in threads of its own, each by one blocking call.
class ThreadQueue : public TransferQueue {
 public:
  // Moves what is left of a transfer. Returns the bytes moved, or -errno.
  using Move = std::function<int64_t(const Transfer&)>;

  ThreadQueue(Move move, uint32_t threads);
  // Nothing is in flight: batches own their drives.
  ~ThreadQueue() override;

  // After fork() the threads do not exist; joining them would wait for ever.
  void abandon();

  void submit(QueueShare& share) override;
  void progress(QueueShare&) override {}
  void wait(QueueShare& share, uint32_t open, Clock::time_point deadline) override;
  void cancel(QueueShare& share) override;

 private:
  struct Shared;
  static void run(Shared& shared);

  const std::shared_ptr<Shared> shared_;
  std::vector<std::thread> workers_;
};

}  // namespace swarm_kv::io
