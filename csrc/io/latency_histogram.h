#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace swarm_kv::io {

// Counts of latencies in logarithmic buckets, eight per power of two: percentiles are exact to
// about 6 %. Recording is lock-free and may run in several threads.
class LatencyHistogram {
 public:
  void record(uint64_t nanoseconds);
  // Latency in microseconds that `fraction` of the records do not exceed; 0 without records.
  double percentile_us(double fraction) const;

 private:
  static constexpr int kSubBits = 3;
  static constexpr int kBuckets = 64 << kSubBits;
  std::array<std::atomic<uint64_t>, kBuckets> counts_{};
};

}  // namespace swarm_kv::io
