#include "io/transfer.h"

#include <algorithm>

namespace swarm_kv::io {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

std::shared_ptr<BatchState> BatchState::finish(Transfer& transfer) {
  if (transfer.share->pending.fetch_sub(1, std::memory_order_acq_rel) != 1) return nullptr;
  std::shared_ptr<BatchState> last;
  std::lock_guard lock(mutex);
  if (--open_shares == 0) last = std::move(self);
  complete.notify_all();
  return last;
}

void BatchState::fail(const Transfer& transfer, int error) {
  std::lock_guard lock(mutex);
  int& first = operations[transfer.operation].error;
  if (first == 0) first = error;
}

void TransferQueue::wait_on_state(QueueShare& share, Clock::time_point deadline) {
  // Bounded, because a deadline far away overflows the clock conversions of wait_until.
  const auto until = std::min(deadline, Clock::now() + std::chrono::hours(1));
  std::unique_lock lock(share.batch->mutex);
  share.batch->complete.wait_until(
      lock, until, [&] { return share.pending.load(std::memory_order_acquire) == 0; });
}

}  // namespace swarm_kv::io
