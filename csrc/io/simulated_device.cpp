#include "io/simulated_device.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "io/error.h"

namespace swarm_kv::io {
namespace {

double to_seconds(int64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-9; }

}  // namespace

double VirtualClock::now() const {
  std::lock_guard lock(mutex_);
  return now_;
}

void VirtualClock::advance_to(double seconds) {
  std::lock_guard lock(mutex_);
  now_ = std::max(now_, seconds);
}

SimulatedDevice::SimulatedDevice(const DeviceOptions& options, std::shared_ptr<VirtualClock> clock)
    : MemoryDevice(options), queue_(*this), clock_(std::move(clock)), model_(options.model) {
  if (!(model_.t_base >= 0 && model_.t_transfer >= 0) || !std::isfinite(model_.t_base) ||
      !std::isfinite(model_.t_transfer)) {
    throw Error(ErrorKind::kArgument,
                "drive '" + name() +
                    "': a simulated drive's t_base = " + std::to_string(model_.t_base) +
                    " s and t_transfer = " + std::to_string(model_.t_transfer) +
                    " s/byte must be finite and not negative");
  }
}

double SimulatedDevice::busy_seconds() const {
  std::lock_guard lock(mutex_);
  return busy_;
}

void SimulatedDevice::set_slowness(double factor) {
  std::lock_guard lock(mutex_);
  slowness_ = factor;
}

Counters SimulatedDevice::counters() const {
  Counters result = MemoryDevice::counters();
  result.busy_seconds = busy_seconds();
  return result;
}

void SimulatedDevice::Queue::submit(QueueShare& share) {
  const double arrival = device_.clock_->now();
  for (Transfer* transfer : share.transfers) {
    device_.copy(*transfer);
    std::lock_guard lock(device_.mutex_);
    const double service = device_.slowness_ * device_.model_.seconds(1, transfer->length);
    device_.free_at_ = std::max(device_.free_at_, arrival) + service;
    device_.busy_ += service;
    transfer->start_ns = std::llround(arrival * 1e9);
    transfer->latency_ns = std::llround((device_.free_at_ - arrival) * 1e9);
  }
}

void SimulatedDevice::Queue::progress(QueueShare& share) {
  uint32_t ended = 0;
  for (Transfer* transfer : share.transfers) {
    if (transfer->phase == Transfer::Phase::kOver) continue;
    transfer->phase = Transfer::Phase::kOver;
    device_.clock_->advance_to(to_seconds(transfer->start_ns + transfer->latency_ns));
    device_.completed(*transfer, transfer->length, 0);
    ++ended;
  }
  if (ended > 0) const auto last = share.batch->finish(share, ended);
}

EngineResult open_simulated(const DeviceOptions& options, EngineContext& context) {
  if (context.shared == nullptr) context.shared = std::make_shared<VirtualClock>();
  return std::make_shared<SimulatedDevice>(options,
                                           std::static_pointer_cast<VirtualClock>(context.shared));
}

}  // namespace swarm_kv::io
