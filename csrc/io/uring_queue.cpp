#include "io/uring_queue.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>

#include "io/error.h"
#include "io/uring_device.h"

namespace swarm_kv::io {
namespace {

constexpr uint32_t kMaxEntries = 32768;       // limit of the kernel
constexpr std::size_t kMaxChunk = 1UL << 30;  // bytes in one registered buffer, ditto
constexpr unsigned kBufferSlots = 256;
constexpr unsigned kReapBatch = 64;
// A waiter asks to be woken after several completions, which another thread may reap first. It
// therefore looks by itself after this long; nearly all waits end before.
constexpr std::chrono::nanoseconds kSoleSlice{1'000'000};
constexpr std::chrono::nanoseconds kSharedSlice{200'000};

// 0 or -errno. Without IORING_SETUP_COOP_TASKRUN on purpose: with it, completions of requests that
// one thread submitted reach a waiter in another one only when the first enters the kernel, which
// was measured to take up to 12 ms while it computes.
int set_up(uint32_t entries, io_uring* ring) {
  io_uring_params parameters{};
  parameters.flags = IORING_SETUP_CLAMP;
  const int result = io_uring_queue_init_params(entries, ring, &parameters);
  if (result == 0 && (parameters.features & IORING_FEAT_EXT_ARG) == 0) {
    io_uring_queue_exit(ring);  // Linux before 5.11: no wait with a time-out
    return -ENOSYS;
  }
  return result;
}

std::string memlock_text() {
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited"
                                         : std::to_string(limit.rlim_cur >> 10) + " KiB";
}

unsigned take_slot(std::vector<bool>& slots) {
  const auto found = std::find(slots.begin(), slots.end(), false);
  if (found != slots.end()) *found = true;
  return static_cast<unsigned>(found - slots.begin());
}

}  // namespace

int UringQueue::probe() {
  io_uring ring{};
  const int result = set_up(2, &ring);
  if (result == 0) io_uring_queue_exit(&ring);
  return -result;
}

UringQueue::UringQueue(uint32_t entries, uint32_t devices) : file_slots_(devices, false) {
  const int result = set_up(std::min(entries, kMaxEntries), &ring_);
  if (result < 0) {
    throw Error(ErrorKind::kStorage,
                "io_uring with " + std::to_string(entries) +
                    " entries was refused: " + std::generic_category().message(-result) +
                    " (errno " + std::to_string(-result) + "); use engine \"threads\"");
  }
  entries_ = ring_.sq.ring_entries;
  files_registered_ = io_uring_register_files_sparse(&ring_, devices) == 0;
}

UringQueue::~UringQueue() { io_uring_queue_exit(&ring_); }

UringQueue::Lane* UringQueue::add_lane(int fd, uint32_t depth) {
  std::lock_guard lock(mutex_);
  auto lane = std::make_unique<Lane>();
  lane->fd = fd;
  lane->limit = std::min(depth, entries_);
  if (files_registered_) {
    const unsigned index = take_slot(file_slots_);
    if (index < file_slots_.size()) {
      if (io_uring_register_files_update(&ring_, index, &fd, 1) == 1) {
        lane->file_index = static_cast<int>(index);
      } else {
        file_slots_[index] = false;
      }
    }
  }
  return lanes_.emplace_back(std::move(lane)).get();
}

void UringQueue::remove_lane(Lane* lane) {
  std::lock_guard lock(mutex_);
  if (lane->file_index >= 0) {
    // The table holds the file open, and an unlinked file's space lives as long as it is open.
    int none = -1;
    io_uring_register_files_update(&ring_, static_cast<unsigned>(lane->file_index), &none, 1);
    file_slots_[static_cast<std::size_t>(lane->file_index)] = false;
  }
  std::erase_if(lanes_, [&](const auto& each) { return each.get() == lane; });
}

std::string UringQueue::register_region(std::span<std::byte> region) {
  std::lock_guard lock(mutex_);
  for (Region& known : regions_) {
    if (known.begin == region.data() && known.bytes == region.size()) {
      ++known.users;
      return {};
    }
  }
  if (!buffers_tried_) {
    buffers_tried_ = true;
    buffers_error_ = -io_uring_register_buffers_sparse(&ring_, kBufferSlots);
    if (buffers_error_ == 0) buffer_slots_.assign(kBufferSlots, false);
  }
  int error = buffers_error_;
  for (std::size_t at = 0; at < region.size() && error == 0; at += kMaxChunk) {
    const std::size_t bytes = std::min(kMaxChunk, region.size() - at);
    const unsigned index = take_slot(buffer_slots_);
    if (index >= buffer_slots_.size()) {
      error = ENOSPC;
      break;
    }
    const iovec chunk{region.data() + at, bytes};
    const int result = io_uring_register_buffers_update_tag(&ring_, index, &chunk, nullptr, 1);
    if (result == 1) {
      chunks_.push_back({region.data() + at, region.data() + at + bytes, index});
    } else {
      buffer_slots_[index] = false;
      error = result < 0 ? -result : EINVAL;
    }
  }
  if (error == 0) {
    regions_.push_back({region.data(), region.size(), 1});
    return {};
  }
  drop_chunks(region.data(), region.size());
  std::string reason =
      "buffers are not registered with io_uring, transfers pin their pages one by "
      "one: " +
      std::generic_category().message(error) + " (errno " + std::to_string(error) + ")";
  if (error == ENOMEM) {
    reason += "; the memlock limit is " + memlock_text() +
              ", raise it with ulimit -l or "
              "LimitMEMLOCK=";
  }
  return reason;
}

void UringQueue::unregister_region(std::span<std::byte> region) {
  std::lock_guard lock(mutex_);
  const auto found = std::find_if(regions_.begin(), regions_.end(), [&](const Region& known) {
    return known.begin == region.data() && known.bytes == region.size();
  });
  if (found == regions_.end() || --found->users > 0) return;
  regions_.erase(found);
  drop_chunks(region.data(), region.size());
}

void UringQueue::drop_chunks(std::byte* begin, std::size_t bytes) {
  std::erase_if(chunks_, [&](const Chunk& chunk) {
    if (chunk.begin < begin || chunk.begin >= begin + bytes) return false;
    const iovec none{nullptr, 0};
    io_uring_register_buffers_update_tag(&ring_, chunk.index, &none, nullptr, 1);
    buffer_slots_[chunk.index] = false;
    return true;
  });
}

void UringQueue::Ended::add(QueueShare& of) {
  if (&of != share) tell();
  share = &of;
  ++count;
}

void UringQueue::Ended::tell() {
  if (count == 0) return;
  auto last = share->batch->finish(*share, count);
  if (last != nullptr) owners.push_back(std::move(last));
  count = 0;
}

void UringQueue::submit(QueueShare& share) {
  Ended ended;
  std::lock_guard lock(mutex_);
  for (Transfer* transfer : share.transfers) {
    static_cast<UringDevice*>(transfer->device)->lane().waiting.push_back(*transfer);
  }
  backlog_.fetch_add(static_cast<uint32_t>(share.transfers.size()), std::memory_order_relaxed);
  refill(ended);
  ended.tell();
}

void UringQueue::progress(QueueShare&) {
  Ended ended;
  std::lock_guard lock(mutex_);
  service(ended);
}

void UringQueue::wait(QueueShare& share, uint32_t open, Clock::time_point deadline) {
  for (;;) {
    Ended ended;
    unsigned wanted = 1;
    bool stuck = false;
    {
      std::lock_guard lock(mutex_);
      service(ended);
      const uint32_t pending = share.pending.load(std::memory_order_acquire);
      const uint32_t left = share.batch->left();
      if (pending == 0 || left <= open) return;
      wanted = std::max(1U, std::min({pending, left - open, in_flight_}));
      // Leave the drive enough to do while this thread wakes up.
      if (has_backlog()) wanted = std::max(1U, wanted / 4);
      stuck = io_uring_sq_ready(&ring_) != 0;
    }
    const auto now = Clock::now();
    if (now >= deadline) return;
    const bool shared = waiters_.fetch_add(1, std::memory_order_relaxed) != 0;
    if (shared || stuck) wanted = 1;
    const std::chrono::nanoseconds slice = std::min<std::chrono::nanoseconds>(
        deadline - now, shared || stuck ? kSharedSlice : kSoleSlice);
    __kernel_timespec timeout{0, slice.count()};
    io_uring_getevents_arg argument{};
    argument.ts = reinterpret_cast<uintptr_t>(&timeout);
    const int result = io_uring_enter2(static_cast<unsigned>(ring_.ring_fd), 0, wanted,
                                       IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG,
                                       reinterpret_cast<sigset_t*>(&argument), sizeof(argument));
    waiters_.fetch_sub(1, std::memory_order_relaxed);
    // Interrupted and timed out waits look again; where waiting is refused, look less often.
    if (result < 0 && result != -EINTR && result != -ETIME) std::this_thread::sleep_for(slice);
  }
}

void UringQueue::cancel(QueueShare& share) {
  Ended ended;
  std::lock_guard lock(mutex_);
  service(ended);
  const int64_t now = now_ns();
  for (const auto& lane : lanes_) {
    TransferList dropped = lane->waiting.remove(share);
    for (; !dropped.empty(); dropped.pop_front()) backlog_.fetch_sub(1, std::memory_order_relaxed);
  }
  for (Transfer* transfer : share.transfers) {
    if (transfer->phase == Transfer::Phase::kQueued) {
      settle(*transfer, -ECANCELED, now, ended);
    } else if (transfer->phase == Transfer::Phase::kInFlight && !transfer->cancel_sent) {
      io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
      if (sqe == nullptr) {
        flush(ended);
        sqe = io_uring_get_sqe(&ring_);
      }
      if (sqe == nullptr) continue;
      io_uring_prep_cancel64(sqe, reinterpret_cast<uintptr_t>(transfer), 0);
      io_uring_sqe_set_data64(sqe, 0);
      transfer->cancel_sent = true;
    }
  }
  flush(ended);
  service(ended);
}

void UringQueue::service(Ended& ended) {
  reap(ended);
  refill(ended);
  ended.tell();
}

void UringQueue::reap(Ended& ended) {
  io_uring_cqe* cqes[kReapBatch];
  for (;;) {
    const unsigned count = io_uring_peek_batch_cqe(&ring_, cqes, kReapBatch);
    if (count == 0) return;
    const int64_t now = now_ns();
    for (unsigned i = 0; i < count; ++i) {
      auto* transfer = reinterpret_cast<Transfer*>(static_cast<uintptr_t>(cqes[i]->user_data));
      if (transfer == nullptr) continue;  // the answer to a cancellation
      --in_flight_;
      --static_cast<UringDevice*>(transfer->device)->lane().in_flight;
      settle(*transfer, cqes[i]->res, now, ended);
    }
    io_uring_cq_advance(&ring_, count);
  }
}

void UringQueue::settle(Transfer& transfer, int64_t result, int64_t now, Ended& ended) {
  if (transfer.device->completed(transfer, result, now) == BlockDevice::Next::kAgain) {
    transfer.phase = Transfer::Phase::kQueued;
    static_cast<UringDevice*>(transfer.device)->lane().waiting.push_front(transfer);
    backlog_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  transfer.phase = Transfer::Phase::kOver;
  ended.add(*transfer.share);
}

void UringQueue::refill(Ended& ended) {
  if (broken_ != 0) return give_up(broken_, ended);
  for (const auto& lane : lanes_) {
    while (!lane->waiting.empty() && lane->in_flight < lane->limit && in_flight_ < entries_) {
      io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
      if (sqe == nullptr) break;
      Transfer& transfer = lane->waiting.pop_front();
      backlog_.fetch_sub(1, std::memory_order_relaxed);
      prepare(transfer, *lane, sqe);
      ++lane->in_flight;
      ++in_flight_;
    }
  }
  flush(ended);
}

void UringQueue::prepare(Transfer& transfer, Lane& lane, io_uring_sqe* sqe) {
  const int fd = lane.file_index >= 0 ? lane.file_index : lane.fd;
  std::byte* data = transfer.rest_data();
  const uint32_t length = transfer.rest_length();
  const uint64_t offset = transfer.rest_offset();
  const Chunk* fixed = nullptr;
  for (const Chunk& chunk : chunks_) {
    if (data >= chunk.begin && data + length <= chunk.end) fixed = &chunk;
  }
  const bool read = transfer.kind == OpKind::kRead;
  if (fixed != nullptr) {
    const int index = static_cast<int>(fixed->index);
    if (read) {
      io_uring_prep_read_fixed(sqe, fd, data, length, offset, index);
    } else {
      io_uring_prep_write_fixed(sqe, fd, data, length, offset, index);
    }
  } else if (read) {
    io_uring_prep_read(sqe, fd, data, length, offset);
  } else {
    io_uring_prep_write(sqe, fd, data, length, offset);
  }
  if (lane.file_index >= 0) sqe->flags |= IOSQE_FIXED_FILE;
  io_uring_sqe_set_data(sqe, &transfer);
  transfer.phase = Transfer::Phase::kInFlight;
}

void UringQueue::flush(Ended& ended) {
  while (io_uring_sq_ready(&ring_) != 0) {
    const int result = io_uring_submit(&ring_);
    if (result > 0 || result == -EINTR) continue;
    // Short of memory or with completions to reap first: the next service() tries again.
    if (result == 0 || result == -EAGAIN || result == -EBUSY || result == -ENOMEM) return;
    broken_ = -result;
    return give_up(broken_, ended);
  }
}

void UringQueue::give_up(int error, Ended& ended) {
  const int64_t now = now_ns();
  // Requests that were prepared but that the kernel never took.
  for (unsigned i = *ring_.sq.khead; i != ring_.sq.sqe_tail; ++i) {
    io_uring_sqe& sqe = ring_.sq.sqes[i & ring_.sq.ring_mask];
    auto* transfer = reinterpret_cast<Transfer*>(static_cast<uintptr_t>(sqe.user_data));
    sqe.user_data = 0;
    if (transfer == nullptr) continue;
    --in_flight_;
    --static_cast<UringDevice*>(transfer->device)->lane().in_flight;
    settle(*transfer, -error, now, ended);
  }
  for (const auto& lane : lanes_) {
    while (!lane->waiting.empty()) {
      Transfer& transfer = lane->waiting.pop_front();
      backlog_.fetch_sub(1, std::memory_order_relaxed);
      settle(transfer, -error, now, ended);
    }
  }
}

}  // namespace swarm_kv::io
