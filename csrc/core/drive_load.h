#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/coalesce.h"

namespace swarm_kv {

// How long each drive would take for what it is asked, by its device model, by the reads that are
// in its queue, and by how much slower than its model it has been of late. Not thread-safe.
//
// The model says what requests cost in a full queue. What a read takes beyond that even on an idle
// drive (its latency) is learned as the least that was ever seen. A drive counts as slow when its
// reads take longer than the model, queue and latency explain, more so than on the best drive, so
// that a machine which is busy as a whole moves nothing. Up to kTolerance it is taken for noise.
class DriveLoad {
 public:
  static constexpr double kTolerance = 2;

  explicit DriveLoad(const std::vector<DriveShape>& drives);

  size_t size() const { return drives_.size(); }
  // Seconds for `requests` of `bytes` in all, without what is queued.
  double seconds(size_t drive, uint64_t requests, uint64_t bytes) const {
    return drives_[drive].slowness * drives_[drive].model.seconds(requests, bytes);
  }
  // Seconds until the drive has served what is in its queue.
  double queued(size_t drive) const { return drives_[drive].slowness * drives_[drive].queue; }
  double slowness(size_t drive) const { return drives_[drive].slowness; }

  // A read enters its drive's queue. Returns the seconds after which it should end.
  double start(const Read& read);
  // A read that was expected after `due` seconds has left the queue after `taken`.
  void end(const Read& read, double due, double taken);
  // A read has left the queue without telling anything about the drive.
  void drop(const Read& read);
  // Learns from what has ended since the last call; what is known of drives without reads fades.
  void learn();

 private:
  struct Drive {
    io::DeviceModel model;
    int64_t reads = 0;    // in the queue
    double queue = 0;     // the same in seconds by the model
    double latency = -1;  // seconds; negative: nothing was seen yet
    double ratio = 1;     // of seconds taken to seconds expected, smoothed
    double slowness = 1;
    double taken = 0;  // sums over what has ended since learn()
    double due = 0;
    int64_t ended = 0;
  };
  std::vector<Drive> drives_;
};

}  // namespace swarm_kv
