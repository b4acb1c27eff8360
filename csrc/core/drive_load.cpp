#include "core/drive_load.h"

#include <algorithm>

namespace swarm_kv {
namespace {

constexpr double kLearned = 1.0 / 4;     // weight of what was seen last
constexpr double kForgotten = 1.0 / 64;  // weight of the model where nothing was seen

}  // namespace

DriveLoad::DriveLoad(const std::vector<DriveShape>& drives) {
  for (const DriveShape& drive : drives) drives_.push_back({.model = drive.model});
}

double DriveLoad::start(const Read& read) {
  Drive& drive = drives_[read.drive];
  ++drive.reads;
  drive.queue += drive.model.seconds(1, read.length);
  return drive.queue;
}

void DriveLoad::drop(const Read& read) {
  Drive& drive = drives_[read.drive];
  // Sums of fractions leave a rest, which must not outlast the queue.
  drive.queue = --drive.reads == 0 ? 0 : drive.queue - drive.model.seconds(1, read.length);
}

void DriveLoad::end(const Read& read, double due, double taken) {
  drop(read);
  Drive& drive = drives_[read.drive];
  const double beyond = std::max(0.0, taken - due);
  drive.latency = drive.latency < 0 ? beyond : std::min(drive.latency, beyond);
  drive.taken += taken;
  drive.due += due;
  ++drive.ended;
}

void DriveLoad::learn() {
  double best = 0;
  for (Drive& drive : drives_) {
    const double expected = drive.due + static_cast<double>(drive.ended) * drive.latency;
    if (drive.ended > 0 && expected > 0) {
      drive.ratio += kLearned * (drive.taken / expected - drive.ratio);
    } else if (drive.reads == 0) {
      drive.ratio += kForgotten * (1 - drive.ratio);
    }
    drive.taken = drive.due = 0;
    drive.ended = 0;
    best = best == 0 ? drive.ratio : std::min(best, drive.ratio);
  }
  for (Drive& drive : drives_) {
    drive.slowness = best > 0 ? std::max(1.0, drive.ratio / best / kTolerance) : 1.0;
  }
}

}  // namespace swarm_kv
