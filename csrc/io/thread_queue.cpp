#include "io/thread_queue.h"

#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "io/block_device.h"

namespace swarm_kv::io {

struct ThreadQueue::Shared {
  Move move;
  std::mutex mutex;
  std::condition_variable work;
  TransferList waiting;
  bool stop = false;
};

ThreadQueue::ThreadQueue(Move move, uint32_t threads) : shared_(std::make_shared<Shared>()) {
  shared_->move = std::move(move);
  for (uint32_t i = 0; i < threads; ++i) {
    // The threads own what they share: one of them may be the last to let go of the drive.
    workers_.emplace_back([shared = shared_] { run(*shared); });
  }
}

ThreadQueue::~ThreadQueue() {
  {
    std::lock_guard lock(shared_->mutex);
    shared_->stop = true;
  }
  shared_->work.notify_all();
  for (std::thread& worker : workers_) {
    if (worker.get_id() == std::this_thread::get_id()) {
      worker.detach();
    } else {
      worker.join();
    }
  }
}

void ThreadQueue::abandon() {
  for (std::thread& worker : workers_) worker.detach();
  workers_.clear();
  shared_->move = nullptr;  // what it holds would stay with the threads' shares of `shared_`
}

void ThreadQueue::submit(QueueShare& share) {
  {
    std::lock_guard lock(shared_->mutex);
    for (Transfer* transfer : share.transfers) shared_->waiting.push_back(*transfer);
  }
  if (share.transfers.size() == 1) {
    shared_->work.notify_one();
  } else {
    shared_->work.notify_all();
  }
}

void ThreadQueue::wait(QueueShare& share, uint32_t open, Clock::time_point deadline) {
  share.batch->wait(open, deadline);
}

void ThreadQueue::cancel(QueueShare& share) {
  TransferList dropped;
  {
    std::lock_guard lock(shared_->mutex);
    dropped = shared_->waiting.remove(share);
  }
  while (!dropped.empty()) {
    Transfer& transfer = dropped.pop_front();
    transfer.device->completed(transfer, -ECANCELED, now_ns());
    const auto last = share.batch->finish(share);
  }
}

void ThreadQueue::run(Shared& shared) {
  for (;;) {
    Transfer* transfer = nullptr;
    {
      std::unique_lock lock(shared.mutex);
      shared.work.wait(lock, [&] { return shared.stop || !shared.waiting.empty(); });
      if (shared.waiting.empty()) return;
      transfer = &shared.waiting.pop_front();
    }
    QueueShare& share = *transfer->share;
    while (transfer->device->completed(*transfer, shared.move(*transfer), now_ns()) ==
           BlockDevice::Next::kAgain) {
    }
    const auto last = share.batch->finish(share);
  }
}

}  // namespace swarm_kv::io
