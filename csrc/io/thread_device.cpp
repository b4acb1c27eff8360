#include "io/thread_device.h"

#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace swarm_kv::io {

class ThreadDevice::Pool : public TransferQueue {
 public:
  Pool(int fd, uint32_t threads) : shared_(std::make_shared<Shared>()) {
    shared_->fd = fd;
    for (uint32_t i = 0; i < threads; ++i) {
      // The threads own what they share: one of them may be the last to let go of the drive.
      workers_.emplace_back([shared = shared_] { run(*shared); });
    }
  }

  // Nothing is in flight: batches own their drives.
  ~Pool() override {
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

  // After fork() the threads do not exist; joining them would wait for ever.
  void abandon() {
    for (std::thread& worker : workers_) worker.detach();
    workers_.clear();
  }

  void submit(QueueShare& share) override {
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

  void progress(QueueShare&) override {}

  void wait(QueueShare& share, uint32_t open, Clock::time_point deadline) override {
    share.batch->wait(open, deadline);
  }

  void cancel(QueueShare& share) override {
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

 private:
  struct Shared {
    int fd = -1;
    std::mutex mutex;
    std::condition_variable work;
    TransferList waiting;
    bool stop = false;
  };

  static void run(Shared& shared) {
    for (;;) {
      Transfer* transfer = nullptr;
      {
        std::unique_lock lock(shared.mutex);
        shared.work.wait(lock, [&] { return shared.stop || !shared.waiting.empty(); });
        if (shared.waiting.empty()) return;
        transfer = &shared.waiting.pop_front();
      }
      QueueShare& share = *transfer->share;
      while (transfer->device->completed(*transfer, move(shared.fd, *transfer), now_ns()) ==
             Next::kAgain) {
      }
      const auto last = share.batch->finish(share);
    }
  }

  static int64_t move(int fd, const Transfer& transfer) {
    const auto offset = static_cast<off_t>(transfer.rest_offset());
    const ssize_t moved = transfer.kind == OpKind::kRead
                              ? pread(fd, transfer.rest_data(), transfer.rest_length(), offset)
                              : pwrite(fd, transfer.rest_data(), transfer.rest_length(), offset);
    return moved < 0 ? -errno : moved;
  }

  std::shared_ptr<Shared> shared_;
  std::vector<std::thread> workers_;
};

ThreadDevice::ThreadDevice(const DeviceOptions& options, std::unique_ptr<DriveFile> file)
    : BlockDevice({.name = options.label,
                   .geometry = file->geometry(),
                   .timeout = options.timeout,
                   .capacity_limit = options.capacity_limit,
                   .capacity = file->capacity(),
                   .notes = file->notes()}),
      file_(std::move(file)),
      pool_(std::make_unique<Pool>(file_->fd(), options.threads)) {}

ThreadDevice::~ThreadDevice() {
  if (!in_owner_process()) pool_->abandon();
}

TransferQueue& ThreadDevice::queue() { return *pool_; }

uint64_t ThreadDevice::reserve_impl(uint64_t bytes) {
  std::string degradation;
  const uint64_t reserved = file_->reserve(bytes, capacity(), &degradation);
  if (!degradation.empty()) note(degradation);
  return reserved;
}

EngineResult open_threads(const DeviceOptions& options, EngineContext&) {
  return std::make_shared<ThreadDevice>(options, std::make_unique<DriveFile>(options));
}

}  // namespace swarm_kv::io
