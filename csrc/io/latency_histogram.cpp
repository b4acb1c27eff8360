#include "io/latency_histogram.h"

#include <bit>
#include <cmath>

namespace swarm_kv::io {
namespace {

constexpr int kSubBits = 3;
constexpr uint64_t kSubCount = 1U << kSubBits;

std::size_t bucket_of(uint64_t value) {
  if (value < kSubCount) return value;
  const int exponent = std::bit_width(value) - 1;
  const uint64_t sub = (value >> (exponent - kSubBits)) & (kSubCount - 1);
  return static_cast<std::size_t>(exponent - kSubBits + 1) * kSubCount + sub;
}

double middle_of(std::size_t bucket) {
  if (bucket < kSubCount) return static_cast<double>(bucket);
  const int shift = static_cast<int>(bucket / kSubCount) - 1;
  const double low = static_cast<double>(kSubCount + bucket % kSubCount);
  return std::ldexp(low + 0.5, shift);
}

}  // namespace

void LatencyHistogram::record(uint64_t nanoseconds) {
  counts_[bucket_of(nanoseconds)].fetch_add(1, std::memory_order_relaxed);
}

double LatencyHistogram::percentile_us(double fraction) const {
  uint64_t total = 0;
  for (const auto& count : counts_) total += count.load(std::memory_order_relaxed);
  if (total == 0) return 0;
  const double wanted = fraction * static_cast<double>(total);
  uint64_t seen = 0;
  std::size_t last = 0;
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    const uint64_t count = counts_[i].load(std::memory_order_relaxed);
    if (count == 0) continue;
    seen += count;
    last = i;
    if (static_cast<double>(seen) >= wanted) break;
  }
  return middle_of(last) * 1e-3;
}

}  // namespace swarm_kv::io
