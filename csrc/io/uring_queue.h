#pragma once

#include <liburing.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "io/transfer.h"

namespace swarm_kv::io {

// One io_uring, for one drive or for several that share it.
//
// Any thread may submit and wait. The lock is held while the ring's memory is touched and requests
// are handed over, not while a thread waits for completions. At most as many requests as the ring
// has entries are in flight, so the completion queue (twice as long) cannot overflow; the rest
// queues here, per drive, and starts as completions are reaped.
class UringQueue : public TransferQueue {
 public:
  // The share of the ring that belongs to one drive.
  struct Lane {
    int fd = -1;
    int file_index = -1;  // in the table of registered files; -1: not registered
    uint32_t limit = 0;   // requests in flight
    uint32_t in_flight = 0;
    TransferList waiting;
  };

  // 0 if a ring with what is needed here can be set up, else the errno.
  static int probe();

  // Throws kStorage when the kernel refuses the ring.
  UringQueue(uint32_t entries, uint32_t devices);
  ~UringQueue() override;
  UringQueue(const UringQueue&) = delete;
  UringQueue& operator=(const UringQueue&) = delete;

  Lane* add_lane(int fd, uint32_t depth);
  void remove_lane(Lane* lane);  // nothing of it is in flight

  // Empty when registered, else the reason. Registering a region again counts its users.
  std::string register_region(std::span<std::byte> region);
  void unregister_region(std::span<std::byte> region);

  void submit(QueueShare& share) override;
  void progress(QueueShare& share) override;
  void wait(QueueShare& share, uint32_t open, Clock::time_point deadline) override;
  void cancel(QueueShare& share) override;
  bool has_backlog() const override { return backlog_.load(std::memory_order_relaxed) != 0; }

 private:
  struct Chunk {
    std::byte* begin;
    std::byte* end;
    unsigned index;
  };
  struct Region {
    std::byte* begin;
    std::size_t bytes;
    uint32_t users;
  };
  // Transfers that ended one after another, told to their batch together, and what that sets free:
  // owners to destroy after the lock is released, because the last one may own this queue.
  struct Ended {
    QueueShare* share = nullptr;
    uint32_t count = 0;
    std::vector<std::shared_ptr<BatchState>> owners;

    void add(QueueShare& of);
    void tell();
  };

  void service(Ended& ended);
  void reap(Ended& ended);
  void refill(Ended& ended);
  void flush(Ended& ended);
  void give_up(int error, Ended& ended);
  void settle(Transfer& transfer, int64_t result, int64_t now, Ended& ended);
  void prepare(Transfer& transfer, Lane& lane, io_uring_sqe* sqe);
  void drop_chunks(std::byte* begin, std::size_t bytes);

  std::mutex mutex_;  // guards everything below but the atomics
  io_uring ring_{};
  uint32_t entries_ = 0;
  uint32_t in_flight_ = 0;
  int broken_ = 0;  // errno of a refused submission; nothing is submitted any more
  bool files_registered_ = false;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<bool> file_slots_;
  bool buffers_tried_ = false;
  int buffers_error_ = 0;
  std::vector<bool> buffer_slots_;
  std::vector<Chunk> chunks_;
  std::vector<Region> regions_;
  std::atomic<uint32_t> backlog_{0};
  std::atomic<uint32_t> waiters_{0};
};

}  // namespace swarm_kv::io
