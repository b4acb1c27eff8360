// What the cases work on: the same numbers in every run and on every machine.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "core/clusters.h"
#include "core/coalesce.h"
#include "core/simulate.h"

namespace swarm_kv::bench {

// The distributions of <random> may differ between libraries; its engines do not.
class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}

  int64_t below(int64_t limit) { return static_cast<int64_t>(engine_() % limit); }
  // In [-1, 1).
  float number() { return static_cast<float>(engine_() >> 8) * 0x1p-23f - 1.0f; }

  template <typename T>
  std::vector<T> numbers(int64_t count) {
    std::vector<T> values(count);
    for (T& value : values) value = static_cast<T>(number());
    return values;
  }
  std::vector<uint8_t> bytes(int64_t count) {
    std::vector<uint8_t> values(count);
    for (uint8_t& value : values) value = static_cast<uint8_t>(engine_());
    return values;
  }
  std::vector<int32_t> permutation(int64_t count) {
    std::vector<int32_t> values(count);
    std::iota(values.begin(), values.end(), 0);
    for (int64_t i = count; i > 1; --i) std::swap(values[i - 1], values[below(i)]);
    return values;
  }

 private:
  std::mt19937 engine_;
};

// Four Samsung PM9A3.
inline std::vector<DriveShape> four_drives() { return {4, {{1e-6, 1.5e-10}, 4096}}; }

inline constexpr int64_t kClusterSize = 16;

// Clusters of kClusterSize that hold each entry once, anywhere, and `copies` of them once more.
inline Clusters scattered_clusters(int64_t entries, int64_t copies, Random& random) {
  Clusters clusters;
  clusters.members = random.permutation(entries);
  for (int64_t i = 0; i < copies; ++i)
    clusters.members.push_back(clusters.members[7 * i % entries]);
  const auto total = static_cast<int64_t>(clusters.members.size());
  for (int64_t end = kClusterSize; end < total; end += kClusterSize) {
    clusters.offsets.push_back(static_cast<int32_t>(end));
  }
  clusters.offsets.push_back(static_cast<int32_t>(total));
  return clusters;
}

// A segment whose clusters lie on four_drives() one after another.
inline Segment placed(Clusters clusters, int64_t entries, int64_t entry_bytes) {
  SimulatedLayout layout{.clusters = std::move(clusters),
                         .entries = entries,
                         .entry_bytes = entry_bytes,
                         .drives = four_drives(),
                         .placement = "sequential",
                         .router = ""};
  return segment_without_data(layout);
}

// Probabilities that a few stretches of `order` have most of, as attention does after clustering.
inline std::vector<float> skewed(const std::vector<int32_t>& order, int64_t entries,
                                 Random& random) {
  std::vector<float> probabilities(entries);
  float level = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    if (i % kClusterSize == 0) level = 8 * random.number();
    probabilities[order[i]] = std::exp(level + 2 * random.number());
  }
  const float sum = std::accumulate(probabilities.begin(), probabilities.end(), 0.0f);
  for (float& probability : probabilities) probability /= sum;
  return probabilities;
}

// A tenth of [0, count) as stretches of up to `longest` neighbours, ascending.
inline std::vector<int64_t> stretches(int64_t count, int64_t longest, Random& random) {
  std::vector<bool> taken(count);
  for (int64_t left = count / 10; left > 0;) {
    const int64_t first = random.below(count);
    const int64_t end = std::min(count, first + 1 + random.below(longest));
    for (int64_t i = first; i < end && left > 0; ++i) {
      left -= !taken[i];
      taken[i] = true;
    }
  }
  std::vector<int64_t> numbers;
  for (int64_t i = 0; i < count; ++i) {
    if (taken[i]) numbers.push_back(i);
  }
  return numbers;
}

}  // namespace swarm_kv::bench
