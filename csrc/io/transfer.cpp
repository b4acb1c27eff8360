#include "io/transfer.h"

#include <algorithm>

namespace swarm_kv::io {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

TransferList TransferList::remove(const QueueShare& share) {
  TransferList kept;
  TransferList removed;
  while (!empty()) {
    Transfer& transfer = pop_front();
    (transfer.share == &share ? removed : kept).push_back(transfer);
  }
  *this = kept;
  return removed;
}

uint32_t BatchState::left() {
  const std::lock_guard lock(mutex);
  return open;
}

std::shared_ptr<BatchState> BatchState::finish(QueueShare& share, uint32_t count) {
  share.pending.fetch_sub(count, std::memory_order_acq_rel);
  std::shared_ptr<BatchState> last;
  const std::lock_guard lock(mutex);
  open -= count;
  if (open == 0) last = std::move(self);
  if (open <= wake_at) progress.notify_all();
  return last;
}

void BatchState::fail(const Transfer& transfer, int error) {
  const std::lock_guard lock(mutex);
  int& first = operations[transfer.operation].error;
  if (first == 0) first = error;
}

void BatchState::wait(uint32_t at_most, Clock::time_point deadline) {
  // Bounded, because a deadline far away overflows the clock conversions of wait_until.
  const auto until = std::min(deadline, Clock::now() + std::chrono::hours(1));
  std::unique_lock lock(mutex);
  wake_at = at_most;
  progress.wait_until(lock, until, [&] { return open <= at_most; });
  wake_at = 0;
}

}  // namespace swarm_kv::io
