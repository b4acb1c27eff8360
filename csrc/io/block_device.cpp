#include "io/block_device.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "io/aligned_buffer.h"
#include "io/device_model.h"
#include "io/error.h"
#include "io/transfer.h"

namespace swarm_kv::io {
namespace {

// A blocking transfer runs in batches of this size, each with the device's time-out.
constexpr uint64_t kBlockingBatch = 32U << 20;
constexpr uint64_t kBounceBytes = 4U << 20;
// Interrupted or momentarily refused requests start again this often before they fail.
constexpr uint8_t kMaxRetries = 100;
constexpr uint8_t kMaxStalls = 2;

uint64_t round_down(uint64_t value, uint64_t unit) { return value / unit * unit; }
uint64_t round_up(uint64_t value, uint64_t unit) { return round_down(value + unit - 1, unit); }
std::size_t slot(OpKind kind) { return static_cast<std::size_t>(kind); }

}  // namespace

BlockDevice::BlockDevice(Setup setup)
    : name_(std::move(setup.name)),
      geometry_(setup.geometry),
      timeout_(setup.timeout),
      capacity_limit_(setup.capacity_limit),
      owner_pid_(getpid()),
      capacity_(setup.capacity),
      notes_(std::move(setup.notes)) {}

BlockDevice::~BlockDevice() = default;

bool BlockDevice::in_owner_process() const { return getpid() == owner_pid_; }

void BlockDevice::check_process() const {
  if (in_owner_process()) return;
  throw Error(ErrorKind::kState, "drive '" + name_ + "' was opened by process " +
                                     std::to_string(owner_pid_) +
                                     " and cannot be used after fork(); open it in this process");
}

void BlockDevice::check_range(OpKind kind, uint64_t offset, uint64_t length) const {
  const uint64_t limit = capacity();
  if (length <= limit && offset <= limit - length) return;
  throw Error(ErrorKind::kArgument, "drive '" + name_ +
                                        "': " + (kind == OpKind::kRead ? "read" : "write") +
                                        " of " + std::to_string(length) + " bytes at offset " +
                                        std::to_string(offset) + " ends past the capacity of " +
                                        std::to_string(limit) + " bytes; reserve() more first");
}

BlockDevice::Next BlockDevice::completed(Transfer& transfer, int64_t result, int64_t now_ns) {
  BatchState& batch = *transfer.share->batch;
  const bool cancelled = batch.cancelled.load(std::memory_order_acquire);
  const auto end = [&] {
    if (transfer.latency_ns < 0)
      transfer.latency_ns = std::max<int64_t>(0, now_ns - transfer.start_ns);
    std::atomic_ref(transfer.ended).store(1, std::memory_order_release);
    return Next::kDone;
  };
  const auto fail = [&](int error) {
    errors_.fetch_add(1, std::memory_order_relaxed);
    batch.fail(transfer, error);
    return end();
  };
  if (result < 0) {
    const int error = static_cast<int>(-result);
    // The kernel also cancels the requests of a thread that ends; those were not given up.
    const bool transient = error == EINTR || error == EAGAIN || error == ECANCELED;
    if (!transient) return fail(error);
    if (cancelled) return fail(ETIMEDOUT);
    return ++transfer.retries > kMaxRetries ? fail(error) : Next::kAgain;
  }
  if (result < transfer.rest_length()) {
    short_transfers_.fetch_add(1, std::memory_order_relaxed);
    // A direct request must start on a block again, so a partly moved block is moved once more.
    const auto done = static_cast<uint32_t>(
        round_down(transfer.done + static_cast<uint64_t>(result), geometry_.block));
    transfer.stalls = done > transfer.done ? 0 : transfer.stalls + 1;
    transfer.done = done;
    if (transfer.stalls >= kMaxStalls) return fail(EIO);
    return cancelled ? fail(ETIMEDOUT) : Next::kAgain;
  }
  transfer.done = transfer.length;
  const std::size_t kind = slot(transfer.kind);
  requests_[kind].fetch_add(1, std::memory_order_relaxed);
  bytes_[kind].fetch_add(transfer.length, std::memory_order_relaxed);
  const Next next = end();
  latency_[kind].record(static_cast<uint64_t>(transfer.latency_ns));
  return next;
}

void BlockDevice::read(uint64_t offset, std::span<std::byte> out) {
  check_range(OpKind::kRead, offset, out.size());
  transfer_any(OpKind::kRead, offset, out.data(), out.size());
}

void BlockDevice::write(uint64_t offset, std::span<const std::byte> data) {
  check_range(OpKind::kWrite, offset, data.size());
  // Transfers have one pointer for both directions; a write only reads through it.
  transfer_any(OpKind::kWrite, offset, const_cast<std::byte*>(data.data()), data.size());
}

void BlockDevice::transfer_any(OpKind kind, uint64_t offset, std::byte* data, uint64_t length) {
  const uint64_t begin = round_up(offset, geometry_.block);
  const uint64_t end = round_down(offset + length, geometry_.block);
  const bool body_aligned =
      begin < end &&
      reinterpret_cast<uintptr_t>(data + (begin - offset)) % geometry_.memory_alignment == 0;
  if (!body_aligned) return transfer_bounced(kind, offset, data, length);
  transfer_bounced(kind, offset, data, begin - offset);
  transfer_aligned(kind, begin, data + (begin - offset), end - begin);
  transfer_bounced(kind, end, data + (end - offset), offset + length - end);
}

void BlockDevice::transfer_aligned(OpKind kind, uint64_t offset, std::byte* data, uint64_t length) {
  Batch batch;
  for (uint64_t done = 0; done < length;) {
    const uint64_t part = std::min(kBlockingBatch, length - done);
    batch.add(*this, kind, offset + done, data + done, static_cast<uint32_t>(part));
    batch.submit();
    batch.wait(timeout_);
    done += part;
  }
}

void BlockDevice::transfer_bounced(OpKind kind, uint64_t offset, std::byte* data, uint64_t length) {
  if (length == 0) return;
  const uint64_t block = geometry_.block;
  const uint64_t begin = round_down(offset, block);
  const uint64_t end = round_up(offset + length, block);
  const uint64_t bounce_bytes = std::min(std::max(kBounceBytes, block), end - begin);
  const auto bounce =
      allocate_aligned(bounce_bytes, std::max<uint64_t>(geometry_.memory_alignment, block));
  const auto move = [&](OpKind direction, uint64_t at, std::byte* memory, uint64_t bytes) {
    Batch batch;
    batch.keep(bounce);
    batch.add(*this, direction, at, memory, static_cast<uint32_t>(bytes));
    batch.submit();
    batch.wait(timeout_);
  };
  for (uint64_t at = begin; at < end; at += bounce_bytes) {
    const uint64_t bytes = std::min(bounce_bytes, end - at);
    const uint64_t from = std::max(at, offset);
    const uint64_t to = std::min(at + bytes, offset + length);
    std::byte* inside = bounce.get() + (from - at);
    if (kind == OpKind::kRead) {
      move(OpKind::kRead, at, bounce.get(), bytes);
      std::memcpy(data + (from - offset), inside, to - from);
      continue;
    }
    const bool head = from > at;
    const bool tail = to < at + bytes;
    std::unique_lock lock(edge_mutex_, std::defer_lock);
    if (head || tail) lock.lock();
    if (head) move(OpKind::kRead, at, bounce.get(), block);
    if (tail && (!head || bytes > block)) {
      move(OpKind::kRead, at + bytes - block, bounce.get() + bytes - block, block);
    }
    std::memcpy(inside, data + (from - offset), to - from);
    move(OpKind::kWrite, at, bounce.get(), bytes);
  }
}

void BlockDevice::flush() {
  check_process();
  flush_impl();
}

void BlockDevice::reserve(uint64_t bytes) {
  const uint64_t wanted = round_up(bytes, geometry_.block);
  std::lock_guard lock(reserve_mutex_);
  if (wanted <= capacity()) return;
  if (capacity_limit_ != 0 && wanted > capacity_limit_) {
    throw Error(ErrorKind::kStorage,
                "drive '" + name_ + "': cannot reserve " + std::to_string(wanted) +
                    " bytes, the limit set for this drive is " + std::to_string(capacity_limit_) +
                    " bytes and " + std::to_string(capacity()) +
                    " are reserved; raise the limit or add a drive");
  }
  capacity_.store(reserve_impl(wanted), std::memory_order_release);
}

bool BlockDevice::register_buffer(std::span<std::byte> region) {
  if (region.empty()) return false;
  check_process();
  return register_buffer_impl(region);
}

void BlockDevice::unregister_buffer(std::span<std::byte> region) {
  if (!region.empty() && in_owner_process()) unregister_buffer_impl(region);
}

bool BlockDevice::register_buffer_impl(std::span<std::byte>) { return false; }

void BlockDevice::unregister_buffer_impl(std::span<std::byte>) {}

std::optional<DeviceModel> BlockDevice::exact_model() const { return std::nullopt; }

void BlockDevice::note(const std::string& text) const {
  std::lock_guard lock(notes_mutex_);
  if (std::find(notes_.begin(), notes_.end(), text) == notes_.end()) notes_.push_back(text);
}

std::vector<std::string> BlockDevice::notes() const {
  std::lock_guard lock(notes_mutex_);
  return notes_;
}

Counters BlockDevice::counters() const {
  const std::size_t read = slot(OpKind::kRead);
  const std::size_t write = slot(OpKind::kWrite);
  Counters result;
  result.reads = requests_[read].load(std::memory_order_relaxed);
  result.writes = requests_[write].load(std::memory_order_relaxed);
  result.read_bytes = bytes_[read].load(std::memory_order_relaxed);
  result.write_bytes = bytes_[write].load(std::memory_order_relaxed);
  result.short_transfers = short_transfers_.load(std::memory_order_relaxed);
  result.errors = errors_.load(std::memory_order_relaxed);
  result.read_p50_us = latency_[read].percentile_us(0.50);
  result.read_p99_us = latency_[read].percentile_us(0.99);
  result.write_p50_us = latency_[write].percentile_us(0.50);
  result.write_p99_us = latency_[write].percentile_us(0.99);
  return result;
}

}  // namespace swarm_kv::io
