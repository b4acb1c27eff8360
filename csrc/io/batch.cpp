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

bool has_ended(BatchState& state, const BatchState::Operation& operation) {
  const auto transfers = std::span(state.transfers).subspan(operation.first, operation.transfers);
  return std::ranges::all_of(transfers, [](Transfer& transfer) {
    return std::atomic_ref(transfer.ended).load(std::memory_order_acquire) != 0;
  });
}

QueueShare& share_of(BatchState& state, TransferQueue& queue) {
  for (const auto& share : state.used()) {
    if (share->queue == &queue) return *share;
  }
  if (state.used_shares == state.shares.size()) {
    state.shares.push_back(std::make_unique<QueueShare>());
  }
  QueueShare& share = *state.shares[state.used_shares++];
  share.queue = &queue;
  share.batch = &state;
  share.transfers.clear();
  return share;
}

// Reaps and starts transfers until at most `open` have not ended, or the deadline has passed.
void drive(BatchState& state, uint32_t open, Clock::time_point deadline) {
  while (state.left() > open) {
    QueueShare* blocking = nullptr;
    bool backlog_elsewhere = false;
    for (const auto& share : state.used()) {
      if (share->pending.load(std::memory_order_acquire) == 0) continue;
      if (state.used_shares > 1) share->queue->progress(*share);
      if (share->pending.load(std::memory_order_acquire) == 0) continue;
      if (blocking == nullptr) {
        blocking = share.get();
      } else {
        backlog_elsewhere |= share->queue->has_backlog();
      }
    }
    const auto now = Clock::now();
    if (now >= deadline) return;
    if (blocking == nullptr) {  // the last engine is on its way out of finish()
      state.wait(open, deadline);
      continue;
    }
    blocking->queue->wait(*blocking, open,
                          backlog_elsewhere ? std::min(deadline, now + kBacklogSlice) : deadline);
  }
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
  if (in_flight()) drive(*state_, 0, Clock::time_point::max());
}

Batch::Batch(Batch&&) noexcept = default;

Batch& Batch::operator=(Batch&& other) noexcept {
  if (this != &other) {
    if (in_flight()) drive(*state_, 0, Clock::time_point::max());
    state_ = std::move(other.state_);
    taken_ = std::move(other.taken_);
    failures_ = std::move(other.failures_);
  }
  return *this;
}

BatchState& Batch::fresh_state() {
  if (in_flight()) {
    throw Error(ErrorKind::kState, "the batch is in flight; wait() for it before adding to it");
  }
  // What was given up owns its state until it ends.
  if (state_ == nullptr || state_->given_up) state_ = std::make_shared<BatchState>();
  BatchState& state = *state_;
  if (!state.submitted) return state;
  state.operations.clear();
  state.transfers.clear();
  state.devices.clear();
  state.kept.clear();
  state.used_shares = 0;
  state.untaken = 0;
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
  if (std::none_of(state.devices.rbegin(), state.devices.rend(),
                   [&](const auto& held) { return held.get() == &device; })) {
    auto held = device.weak_from_this().lock();
    if (held == nullptr) {
      throw Error(ErrorKind::kState, "drive '" + device.name() + "' is not held by a shared_ptr");
    }
    state.devices.push_back(std::move(held));
  }
  const auto operation = static_cast<uint32_t>(state.operations.size());
  const auto first = static_cast<uint32_t>(state.transfers.size());
  for (uint32_t done = 0; done < length;) {
    Transfer& transfer = state.transfers.emplace_back();
    transfer.device = &device;
    transfer.kind = kind;
    transfer.offset = offset + done;
    transfer.data = data + done;
    transfer.length = std::min(geometry.max_transfer, length - done);
    transfer.operation = operation;
    done += transfer.length;
  }
  const uint32_t count = static_cast<uint32_t>(state.transfers.size()) - first;
  state.operations.push_back({&device, kind, offset, data, length, first, count});
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
      if (share == nullptr || share->queue != queue) share = &share_of(state, *queue);
    }
    transfer.start_ns = start;
    transfer.share = share;
    share->transfers.push_back(&transfer);
  }
  for (const auto& each : state.used()) {
    each->pending.store(static_cast<uint32_t>(each->transfers.size()), std::memory_order_relaxed);
  }
  state.open = state.untaken = static_cast<uint32_t>(state.transfers.size());
  state.submitted = true;
  for (const auto& each : state.used()) each->queue->submit(*each);
}

bool Batch::poll() {
  if (!in_flight()) return true;
  for (const auto& share : state_->used()) {
    if (share->pending.load(std::memory_order_acquire) != 0) share->queue->progress(*share);
  }
  return state_->left() == 0;
}

// Returns when at most `open` transfers have not ended; after the time-out all have, or were given
// up.
void Batch::settle(std::chrono::milliseconds timeout, uint32_t open) {
  const bool forever = timeout >= std::chrono::hours(24 * 365);
  drive(*state_, open, forever ? Clock::time_point::max() : Clock::now() + timeout);
  if (state_->left() > open) give_up();
}

void Batch::give_up() {
  BatchState& state = *state_;
  state.cancelled = true;
  for (const auto& share : state.used()) share->queue->cancel(*share);
  drive(state, 0, state.kept.empty() ? Clock::time_point::max() : Clock::now() + kCancelGrace);
  const std::lock_guard lock(state.mutex);
  // Under the lock a late transfer either is over by now or will find `self` when it ends.
  if (state.open == 0) return;
  state.self = state_;
  state.given_up = true;
  for (BatchState::Operation& operation : state.operations) {
    if (!has_ended(state, operation) && operation.error == 0) operation.error = ETIMEDOUT;
  }
}

std::span<const uint32_t> Batch::take(std::chrono::milliseconds timeout) {
  taken_.clear();
  if (state_ == nullptr || !state_->submitted) return {};
  BatchState& state = *state_;
  const uint32_t part = std::max(kLeastPart, static_cast<uint32_t>(state.transfers.size() + 3) / 4);
  while (taken_.empty() && state.untaken > 0) {
    if (!state.given_up) settle(timeout, state.untaken > part ? state.untaken - part : 0);
    for (uint32_t i = 0; i < state.operations.size(); ++i) {
      BatchState::Operation& operation = state.operations[i];
      if (operation.taken || (!state.given_up && !has_ended(state, operation))) continue;
      operation.taken = true;
      state.untaken -= operation.transfers;
      taken_.push_back(i);
    }
  }
  // Every transfer is over; its engine may still be on the way out of finish().
  if (state.untaken == 0 && !state.given_up) drive(state, 0, Clock::time_point::max());
  return taken_;
}

int Batch::error(uint32_t index) const { return state_->operations[index].error; }

int64_t Batch::latency_ns(uint32_t index) const {
  const BatchState::Operation& operation = state_->operations[index];
  int64_t longest = 0;
  for (uint32_t i = operation.first; i < operation.first + operation.transfers; ++i) {
    const Transfer& transfer = state_->transfers[i];
    // What was given up may still end.
    const bool ended =
        std::atomic_ref(const_cast<uint8_t&>(transfer.ended)).load(std::memory_order_acquire) != 0;
    longest = std::max(longest, ended ? transfer.latency_ns : now_ns() - transfer.start_ns);
  }
  return longest;
}

bool Batch::gave_up() const { return state_ != nullptr && state_->given_up; }

void Batch::wait(std::chrono::milliseconds timeout) {
  if (state_ == nullptr) return;
  if (!state_->submitted) submit();
  BatchState& state = *state_;
  if (!state.submitted) return;
  failures_.clear();
  if (!state.given_up) settle(timeout, 0);
  state.untaken = 0;
  {
    const std::lock_guard lock(state.mutex);
    for (std::size_t i = 0; i < state.operations.size(); ++i) {
      BatchState::Operation& op = state.operations[i];
      op.taken = true;
      if (op.error == 0) continue;
      failures_.push_back({i, op.device->weak_from_this().lock(), op.kind, op.offset, op.data,
                           op.length, op.error});
    }
  }
  if (failures_.empty()) return;
  throw Error(ErrorKind::kStorage,
              describe(failures_.front(), failures_.size(), state.operations.size()));
}

void Batch::cancel() {
  if (in_flight()) give_up();
}

std::size_t Batch::size() const { return state_ == nullptr ? 0 : state_->operations.size(); }

bool Batch::in_flight() const {
  return state_ != nullptr && state_->submitted && !state_->given_up && state_->left() > 0;
}

}  // namespace swarm_kv::io
