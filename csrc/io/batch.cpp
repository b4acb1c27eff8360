#include "io/batch.h"

#include <algorithm>
#include <string>
#include <system_error>
#include <utility>

#include "io/block_device.h"
#include "io/error.h"
#include "io/transfer.h"

namespace swarm_kv::io {
namespace {

// How long a cancelled transfer whose memory is kept may take to end before wait() gives up on it.
constexpr std::chrono::milliseconds kCancelGrace{100};
// While a wait blocks on one queue, other queues with a backlog are looked at this often.
constexpr std::chrono::microseconds kBacklogSlice{200};

const char* verb(OpKind kind) { return kind == OpKind::kRead ? "read" : "write"; }

bool is_complete(BatchState& state) {
  if (!state.submitted) return true;
  std::lock_guard lock(state.mutex);
  return state.open_shares == 0;
}

// Reaps and starts transfers until the batch is complete or the deadline has passed.
void drive(BatchState& state, Clock::time_point deadline) {
  for (;;) {
    QueueShare* blocking = nullptr;
    bool backlog_elsewhere = false;
    for (QueueShare& share : state.shares) {
      if (share.pending.load(std::memory_order_acquire) == 0) continue;
      if (state.shares.size() > 1) share.queue->progress(share);
      if (share.pending.load(std::memory_order_acquire) == 0) continue;
      if (blocking == nullptr) {
        blocking = &share;
      } else {
        backlog_elsewhere |= share.queue->has_backlog();
      }
    }
    if (blocking == nullptr) break;
    const auto now = Clock::now();
    if (now >= deadline) return;
    blocking->queue->wait(*blocking,
                          backlog_elsewhere ? std::min(deadline, now + kBacklogSlice) : deadline);
  }
  // Every transfer is over; its engine may still be on the way out of finish().
  std::unique_lock lock(state.mutex);
  state.complete.wait(lock, [&] { return state.open_shares == 0; });
}

std::string describe(const Failure& failure, std::size_t failed, std::size_t total) {
  std::string text = "drive '" + failure.device->name() + "': " + verb(failure.kind) + " of " +
                     std::to_string(failure.length) + " bytes at offset " +
                     std::to_string(failure.offset) + " failed: ";
  if (failure.error == ETIMEDOUT) {
    text += "timed out";
  } else {
    text += std::generic_category().message(failure.error);
  }
  text += " (errno " + std::to_string(failure.error) + ")";
  if (total > 1) {
    text += "; " + std::to_string(failed) + " of " + std::to_string(total) + " transfers failed";
  }
  return text;
}

}  // namespace

Batch::Batch() : state_(std::make_shared<BatchState>()) {}

Batch::~Batch() {
  if (state_ != nullptr && state_->submitted) drive(*state_, Clock::time_point::max());
}

Batch::Batch(Batch&&) noexcept = default;

Batch& Batch::operator=(Batch&& other) noexcept {
  if (this != &other) {
    if (state_ != nullptr && state_->submitted) drive(*state_, Clock::time_point::max());
    state_ = std::move(other.state_);
    failures_ = std::move(other.failures_);
  }
  return *this;
}

BatchState& Batch::fresh_state() {
  if (state_ == nullptr) state_ = std::make_shared<BatchState>();
  BatchState& state = *state_;
  if (!state.submitted) return state;
  if (!is_complete(state)) {
    throw Error(ErrorKind::kState, "the batch is in flight; wait() for it before adding to it");
  }
  state.operations.clear();
  state.transfers.clear();
  state.shares.clear();
  state.devices.clear();
  state.kept.clear();
  state.submitted = false;
  state.cancelled = false;
  failures_.clear();
  return state;
}

void Batch::add(BlockDevice& device, OpKind kind, uint64_t offset, std::byte* data,
                uint32_t length) {
  BatchState& state = fresh_state();
  const Geometry& geometry = device.geometry();
  if (length == 0 || offset % geometry.block != 0 || length % geometry.block != 0 ||
      reinterpret_cast<uintptr_t>(data) % geometry.memory_alignment != 0) {
    throw Error(ErrorKind::kArgument,
                "drive '" + device.name() + "': a batched " + verb(kind) + " of " +
                    std::to_string(length) + " bytes at offset " + std::to_string(offset) +
                    " (address mod " + std::to_string(geometry.memory_alignment) + " = " +
                    std::to_string(reinterpret_cast<uintptr_t>(data) % geometry.memory_alignment) +
                    ") must be a positive multiple of the block of " +
                    std::to_string(geometry.block) + " bytes and start on a memory alignment of " +
                    std::to_string(geometry.memory_alignment) +
                    "; use the blocking read() and write() for other ranges");
  }
  device.check_range(kind, offset, length);
  if (std::none_of(state.devices.begin(), state.devices.end(),
                   [&](const auto& held) { return held.get() == &device; })) {
    auto held = device.weak_from_this().lock();
    if (held == nullptr) {
      throw Error(ErrorKind::kState, "drive '" + device.name() + "' is not held by a shared_ptr");
    }
    state.devices.push_back(std::move(held));
  }
  const auto operation = static_cast<uint32_t>(state.operations.size());
  state.operations.push_back({&device, kind, offset, data, length});
  for (uint32_t done = 0; done < length;) {
    Transfer transfer;
    transfer.device = &device;
    transfer.kind = kind;
    transfer.offset = offset + done;
    transfer.data = data + done;
    transfer.length = std::min(geometry.max_transfer, length - done);
    transfer.operation = operation;
    state.transfers.push_back(transfer);
    done += transfer.length;
  }
}

void Batch::keep(std::shared_ptr<void> memory) { fresh_state().kept.push_back(std::move(memory)); }

void Batch::submit() {
  BatchState& state = fresh_state();
  if (state.transfers.empty()) return;
  for (const auto& device : state.devices) device->check_process();

  const int64_t start = now_ns();
  const BlockDevice* device = nullptr;
  QueueShare* share = nullptr;
  for (Transfer& transfer : state.transfers) {
    if (transfer.device != device) {
      device = transfer.device;
      TransferQueue* queue = &transfer.device->queue();
      const auto found = std::find_if(state.shares.begin(), state.shares.end(),
                                      [&](const QueueShare& s) { return s.queue == queue; });
      share = found == state.shares.end() ? &state.shares.emplace_back() : &*found;
      share->queue = queue;
      share->batch = &state;
    }
    transfer.start_ns = start;
    transfer.share = share;
    share->transfers.push_back(&transfer);
  }
  for (QueueShare& each : state.shares) {
    each.pending.store(static_cast<uint32_t>(each.transfers.size()), std::memory_order_relaxed);
  }
  state.open_shares = static_cast<uint32_t>(state.shares.size());
  state.submitted = true;
  for (QueueShare& each : state.shares) each.queue->submit(each);
}

bool Batch::poll() {
  if (state_ == nullptr || !state_->submitted) return true;
  for (QueueShare& share : state_->shares) {
    if (share.pending.load(std::memory_order_acquire) != 0) share.queue->progress(share);
  }
  return is_complete(*state_);
}

void Batch::wait(std::chrono::milliseconds timeout) {
  if (state_ == nullptr) return;
  if (!state_->submitted) submit();
  BatchState& state = *state_;
  if (!state.submitted) return;
  failures_.clear();

  const auto now = Clock::now();
  const bool forever = timeout >= std::chrono::hours(24 * 365);
  drive(state, forever ? Clock::time_point::max() : now + timeout);
  bool complete = is_complete(state);
  if (!complete) {
    state.cancelled = true;
    for (QueueShare& share : state.shares) share.queue->cancel(share);
    drive(state, state.kept.empty() ? Clock::time_point::max() : Clock::now() + kCancelGrace);
    complete = is_complete(state);
  }

  {
    std::lock_guard lock(state.mutex);
    // Under the lock a late transfer either is over by now or will find `self` when it ends.
    complete = state.open_shares == 0;
    if (!complete) {
      state.self = state_;
      for (Transfer& transfer : state.transfers) {
        int& error = state.operations[transfer.operation].error;
        const bool over = std::atomic_ref(transfer.succeeded).load(std::memory_order_acquire) != 0;
        if (!over && error == 0) error = ETIMEDOUT;
      }
    }
    for (std::size_t i = 0; i < state.operations.size(); ++i) {
      const BatchState::Operation& op = state.operations[i];
      if (op.error == 0) continue;
      failures_.push_back({i, op.device->weak_from_this().lock(), op.kind, op.offset, op.data,
                           op.length, op.error});
    }
  }
  const std::size_t total = state.operations.size();
  // What is left in flight owns the old state from here on.
  if (!complete) state_ = std::make_shared<BatchState>();
  if (failures_.empty()) return;
  throw Error(ErrorKind::kStorage, describe(failures_.front(), failures_.size(), total));
}

std::size_t Batch::size() const { return state_ == nullptr ? 0 : state_->operations.size(); }

bool Batch::in_flight() const { return state_ != nullptr && !is_complete(*state_); }

}  // namespace swarm_kv::io
