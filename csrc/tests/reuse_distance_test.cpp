#include "core/reuse_distance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "core/simulate_cache.h"

namespace swarm_kv {
namespace {

using Steps = std::vector<std::vector<int32_t>>;

// Entry e is activated with a probability that falls with its rank; ranks drift.
Steps drifting(int32_t entries, int count, double share, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform(0, 1);
  std::vector<int32_t> rank(entries);
  std::iota(rank.begin(), rank.end(), 0);
  std::shuffle(rank.begin(), rank.end(), random);
  Steps steps(count);
  for (int t = 0; t < count; ++t) {
    for (int32_t e = 0; e < entries; ++e) {
      const double place = (rank[e] + t * entries / 2000) % entries;
      const double probability = 0.8 * std::exp(-place / (share * entries));
      if (uniform(random) < probability) steps[t].push_back(e);
    }
  }
  return steps;
}

// Of segments that are activated alike.
ReuseDistances measure(int64_t entries, const Steps& steps, int segments = 1) {
  ReuseDistances distances;
  for (int segment = 0; segment < segments; ++segment) {
    ReuseSample sample(entries, segment);
    for (const auto& step : steps) sample.touch(step, distances);
  }
  return distances;
}

// Share of the activations that a least-recently-used cache of so many entries misses.
double missed_by_lru(int32_t entries, int64_t capacity, const Steps& steps) {
  SimulatedLayout layout{.clusters = {},
                         .entries = entries,
                         .entry_bytes = 1,
                         .drives = {{{1e-5, 1e-9}, 1}},
                         .placement = "sequential",
                         .router = ""};
  layout.clusters.members.resize(entries);
  std::iota(layout.clusters.members.begin(), layout.clusters.members.end(), 0);
  std::vector<std::vector<int64_t>> wide;
  for (const auto& step : steps) wide.emplace_back(step.begin(), step.end());
  const std::vector<std::span<const int64_t>> spans(wide.begin(), wide.end());
  const auto served = simulate_cache(layout, "lru", capacity, {}, spans);
  return 1 - std::accumulate(served.begin(), served.end(), 0.0) / served.size();
}

double missed_by_curve(const ReuseDistances& distances, double share) {
  double missed = distances.first;
  for (int b = std::lround(share * ReuseDistances::kBuckets); b < ReuseDistances::kBuckets; ++b) {
    missed += distances.count[b];
  }
  return missed / distances.expected;
}

TEST(ReuseDistance, OfAllEntriesIsExactlyWhatLruMisses) {
  const Steps steps = drifting(100, 300, 0.1, 1);
  const ReuseDistances distances = measure(100, steps);
  for (int64_t capacity = 40; capacity <= 100; ++capacity) {  // more than a step activates
    EXPECT_NEAR(missed_by_curve(distances, capacity / 100.0), missed_by_lru(100, capacity, steps),
                1e-12)
        << capacity;
  }
  EXPECT_GT(missed_by_lru(100, 40, steps), missed_by_lru(100, 80, steps) + 0.005);
}

TEST(ReuseDistance, OfASampleIsNearIt) {
  const Steps steps = drifting(8000, 300, 0.05, 2), others = drifting(8000, 300, 0.15, 2);
  const ReuseDistances distances = measure(8000, steps, 6);
  const ReuseDistances wrong = measure(8000, others, 6);
  double apart = 0;
  for (const double share : {0.1, 0.15, 0.25, 0.5}) {
    const double missed = missed_by_lru(8000, std::lround(share * 8000), steps);
    EXPECT_NEAR(missed_by_curve(distances, share), missed, 0.025) << share;
    apart = std::max(apart, std::abs(missed_by_curve(wrong, share) - missed));
  }
  EXPECT_GT(apart, 0.1);
}

TEST(ReuseDistance, MemoryDoesNotGrowWithTheSegment) {
  const uint64_t small = ReuseSample(4000, 1).bytes();
  EXPECT_LT(ReuseSample(1 << 20, 1).bytes(), 1.3 * small);
  EXPECT_GT(1.3 * ReuseSample(1 << 20, 1).bytes(), small);
  EXPECT_EQ(ReuseSample(0, 1).bytes(), 0u);
}

}  // namespace
}  // namespace swarm_kv
