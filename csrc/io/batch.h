#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace swarm_kv::io {

class BlockDevice;
struct BatchState;

enum class OpKind : uint8_t { kRead, kWrite };

// One add() that did not complete in full. Nothing may be assumed about the bytes at `data`.
struct Failure {
  std::size_t index = 0;  // position among the add() calls of the batch
  std::shared_ptr<BlockDevice> device;
  OpKind kind = OpKind::kRead;
  uint64_t offset = 0;
  std::byte* data = nullptr;
  uint32_t length = 0;
  int error = 0;  // errno; ETIMEDOUT after a time-out, EIO for transfers that stopped progressing
};

// Transfers over any number of devices: started together, taken as they end.
//
// One thread at a time uses a batch; many batches may use the same devices at once. The transfers
// of a batch run in any order, so ranges of one batch must not overlap where one of them is a
// write. A batch may be filled again once all of it was taken; it keeps its memory.
class Batch {
 public:
  Batch();
  ~Batch();  // waits for what is in flight
  Batch(Batch&&) noexcept;
  Batch& operator=(Batch&&) noexcept;
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  // `offset` and `length` are multiples of the device's block, `data` of its memory_alignment, and
  // the range lies below capacity(); anything else is kArgument. A length above max_transfer is
  // split. The device must be held by a shared_ptr, which the batch shares until it completes.
  void add(BlockDevice& device, OpKind kind, uint64_t offset, std::byte* data, uint32_t length);

  // Shares the ownership of the memory that the transfers use. Without it, nothing returns before
  // the kernel has let go of every buffer, however long a hung drive takes. With it, transfers that
  // cannot be cancelled are given up soon after the time-out and keep the memory alive; the caller
  // must then drop the memory of those that failed with ETIMEDOUT and not reuse it.
  void keep(std::shared_ptr<void> memory);

  // Starts everything added: one submission per queue, all devices of a shared ring together. Never
  // waits for a transfer; what exceeds the queue depth starts as earlier transfers are reaped.
  void submit();

  // True when every transfer has completed or failed (wait() then tells which). Never blocks.
  bool poll();

  // Waits for a part of what is in flight that is worth a caller's turn, a quarter of the batch and
  // at least kLeastPart, or for the rest. Returns the positions among the add() calls of all that
  // ended since the last take(), ascending; valid until the next call. Empty when nothing is left.
  // At the time-out everything that has not ended is cancelled and fails.
  std::span<const uint32_t> take(std::chrono::milliseconds timeout);
  static constexpr uint32_t kLeastPart = 8;

  // Of an add() that was taken: errno of its failure, 0 for none, and the time from submit() until
  // it ended, in nanoseconds (virtual on simulated drives).
  int error(uint32_t index) const;
  int64_t latency_ns(uint32_t index) const;
  // Whether transfers that could not be cancelled were given up.
  bool gave_up() const;

  // Returns when all transfers completed in full, else throws Error(kStorage) that names drive,
  // offset, length and errno of the first failure. At the time-out everything not complete is
  // cancelled; except for memory given to keep(), no transfer is in flight after return or throw.
  void wait(std::chrono::milliseconds timeout);

  // Ends what is in flight as a time-out does: it is cancelled, and fails unless it has completed.
  void cancel();

  // Failures of the last wait(), one per add(), in the order of add().
  const std::vector<Failure>& failures() const { return failures_; }

  std::size_t size() const;  // add() calls since the last round
  bool in_flight() const;

 private:
  BatchState& fresh_state();
  void settle(std::chrono::milliseconds timeout, uint32_t open);
  void give_up();

  std::shared_ptr<BatchState> state_;
  std::vector<uint32_t> taken_;
  std::vector<Failure> failures_;
};

}  // namespace swarm_kv::io
