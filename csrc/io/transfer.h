#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "io/batch.h"

// What engines see of a batch. Callers of csrc/io need only block_device.h and open_device.h.
namespace swarm_kv::io {

struct BatchState;
struct QueueShare;
class TransferQueue;

using Clock = std::chrono::steady_clock;

int64_t now_ns();

// One request of at most max_transfer bytes.
struct Transfer {
  BlockDevice* device = nullptr;
  std::byte* data = nullptr;
  uint64_t offset = 0;
  uint32_t length = 0;
  uint32_t done = 0;  // bytes moved so far, a multiple of the block until complete
  OpKind kind = OpKind::kRead;
  uint8_t stalls = 0;      // completions in a row that moved nothing
  uint8_t retries = 0;     // interrupted or refused for the moment
  uint32_t operation = 0;  // index of the add() call
  QueueShare* share = nullptr;
  Transfer* next = nullptr;  // for the queue that holds the transfer
  int64_t start_ns = 0;
  int64_t latency_ns = -1;  // from submit() to the end; engines with a clock of their own set it

  // For the queue that holds the transfer, under its lock.
  enum class Phase : uint8_t { kQueued, kInFlight, kOver } phase = Phase::kQueued;
  bool cancel_sent = false;
  uint8_t ended = 0;  // through std::atomic_ref; what is above does not change any more

  std::byte* rest_data() const { return data + done; }
  uint64_t rest_offset() const { return offset + done; }
  uint32_t rest_length() const { return length - done; }
};

// Transfers in order, linked through Transfer::next.
class TransferList {
 public:
  bool empty() const { return first_ == nullptr; }
  void push_back(Transfer& transfer) {
    transfer.next = nullptr;
    (first_ == nullptr ? first_ : last_->next) = &transfer;
    last_ = &transfer;
  }
  void push_front(Transfer& transfer) {
    transfer.next = first_;
    if (first_ == nullptr) last_ = &transfer;
    first_ = &transfer;
  }
  Transfer& pop_front() {
    Transfer& transfer = *first_;
    first_ = transfer.next;
    return transfer;
  }
  // Moves the transfers of `share` to the returned list.
  TransferList remove(const QueueShare& share);

 private:
  Transfer* first_ = nullptr;
  Transfer* last_ = nullptr;
};

// The transfers of a batch that go to one queue.
struct QueueShare {
  TransferQueue* queue = nullptr;
  BatchState* batch = nullptr;
  std::vector<Transfer*> transfers;
  std::atomic<uint32_t> pending{0};
};

struct BatchState {
  struct Operation {
    BlockDevice* device;
    OpKind kind;
    uint64_t offset;
    std::byte* data;
    uint32_t length;
    uint32_t first;  // [first, first + transfers) of BatchState::transfers
    uint32_t transfers;
    bool taken = false;
    int error = 0;  // errno of the first failure of any of its transfers
  };

  std::vector<Operation> operations;
  std::vector<Transfer> transfers;
  std::vector<std::unique_ptr<QueueShare>> shares;  // the first `used_shares` are in use
  std::size_t used_shares = 0;
  std::vector<std::shared_ptr<BlockDevice>> devices;
  std::vector<std::shared_ptr<void>> kept;
  uint32_t untaken = 0;  // transfers of operations that were not taken
  bool submitted = false;
  std::atomic<bool> cancelled{false};

  std::mutex mutex;  // guards what follows, and Operation::error while in flight
  std::condition_variable progress;
  uint32_t open = 0;     // transfers that have not ended
  uint32_t wake_at = 0;  // `progress` is told when so few are left
  // Set when a batch gives up on transfers that cannot be cancelled: keeps this state, and with it
  // devices and kept memory, alive until the last of them ends.
  std::shared_ptr<BatchState> self;
  bool given_up = false;

  std::span<const std::unique_ptr<QueueShare>> used() const {
    return std::span(shares).first(used_shares);
  }
  uint32_t left();  // `open`, under the lock
  // Returns when at most `at_most` transfers have not ended, or at the deadline.
  void wait(uint32_t at_most, Clock::time_point deadline);
  // Ends `count` transfers of one share, for which completed() returned kDone. The engine destroys
  // the returned owner, if any, outside its locks: it may be the last one of the batch, its devices
  // and the engine itself.
  [[nodiscard]] std::shared_ptr<BatchState> finish(QueueShare& share, uint32_t count = 1);
  void fail(const Transfer& transfer, int error);
};

// Moves the bytes of transfers, for one drive or several. The queue hands each outcome to
// BlockDevice::completed() and, after kDone, to BatchState::finish(). Functions may be called by
// several threads at once.
class TransferQueue {
 public:
  virtual ~TransferQueue() = default;
  // Takes all transfers of the share. Never waits for one of them.
  virtual void submit(QueueShare& share) = 0;
  // Reaps what has completed and starts what was queued; does not block.
  virtual void progress(QueueShare& share) = 0;
  // Returns when at most `open` transfers of the batch have not ended, at the deadline, or earlier.
  virtual void wait(QueueShare& share, uint32_t open, Clock::time_point deadline) = 0;
  // Ends the transfers of the share that have not started and asks for the end of the others. Each
  // still gets its completion, with -ECANCELED where it was cut off.
  virtual void cancel(QueueShare& share) = 0;
  // True if queued transfers start only when someone calls progress() or wait().
  virtual bool has_backlog() const { return false; }
};

}  // namespace swarm_kv::io
