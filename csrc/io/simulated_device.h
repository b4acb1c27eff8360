#pragma once

#include <mutex>

#include "io/device_model.h"
#include "io/memory_device.h"

namespace swarm_kv::io {

// Virtual time of the drives opened together, in seconds. It moves only when a batch is waited for
// or polled, to the moment at which the batch's last request would have been served.
class VirtualClock {
 public:
  double now() const;
  void advance_to(double seconds);

 private:
  mutable std::mutex mutex_;
  double now_ = 0;
};

// A drive that keeps its data in memory and serves its requests one after another, each in exactly
// t_base + bytes * t_transfer seconds of virtual time. Nothing sleeps; equal calls in one thread
// give equal times on every machine.
class SimulatedDevice : public MemoryDevice {
 public:
  SimulatedDevice(const DeviceOptions& options, std::shared_ptr<VirtualClock> clock);
  std::string_view engine() const override { return "simulated"; }
  TransferQueue& queue() override { return queue_; }
  Counters counters() const override;
  std::optional<DeviceModel> exact_model() const override { return model_; }
  const VirtualClock& clock() const { return *clock_; }
  double busy_seconds() const;
  // From now on requests take `factor` times as long as the model says.
  void set_slowness(double factor);

 private:
  class Queue : public TransferQueue {
   public:
    explicit Queue(SimulatedDevice& device) : device_(device) {}
    void submit(QueueShare& share) override;
    void progress(QueueShare& share) override;
    void wait(QueueShare& share, uint32_t, Clock::time_point) override { progress(share); }
    void cancel(QueueShare& share) override { progress(share); }

   private:
    SimulatedDevice& device_;
  };

  Queue queue_;
  const std::shared_ptr<VirtualClock> clock_;
  const DeviceModel model_;
  mutable std::mutex mutex_;
  double free_at_ = 0;  // virtual time at which the last request is served
  double busy_ = 0;
  double slowness_ = 1;
};

EngineResult open_simulated(const DeviceOptions& options, EngineContext& context);

}  // namespace swarm_kv::io
