#include "core/simulate_cache.h"

#include <algorithm>

#include "core/cluster_cache.h"
#include "core/entry_pool.h"
#include "io/error.h"

namespace swarm_kv {
namespace {

std::vector<int32_t> checked(std::span<const int64_t> step, int64_t entries) {
  std::vector<int32_t> sorted;
  for (const int64_t entry : step) {
    if (entry < 0 || entry >= entries) {
      throw Error(ErrorKind::kArgument, "simulate_cache: entry " + std::to_string(entry) +
                                            " is outside [0, " + std::to_string(entries) + ")");
    }
    sorted.push_back(static_cast<int32_t>(entry));
  }
  std::vector<int32_t> result = sorted;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    throw Error(ErrorKind::kArgument,
                "simulate_cache: a step names entry " + std::to_string(*twice) + " twice");
  }
  return result;
}

}  // namespace

std::vector<uint8_t> simulate_cache(SimulatedLayout layout, const std::string& policy,
                                    int64_t capacity, const InitialFill& fill,
                                    std::span<const std::span<const int64_t>> steps) {
  if (capacity < 0) {
    throw Error(ErrorKind::kArgument,
                "simulate_cache: `capacity` must be at least 0, got " + std::to_string(capacity));
  }
  make_cache_policy(policy);
  const auto score = make_tier_score(fill.score);
  if (score) fill.check(layout.entries);
  Segment segment = segment_without_data(layout);
  std::vector<std::vector<int32_t>> activated;
  for (const auto step : steps) activated.push_back(checked(step, segment.entries));

  // Entries of one byte that nobody looks at, and a budget of just `capacity` of them.
  constexpr uint64_t kUnlimited = uint64_t{1} << 40;
  Budget unlimited(kUnlimited);
  EntryPool pool(1, 0, std::min(capacity, segment.entries) + 1, unlimited);
  pool.set_entry_bytes(1);
  Budget budget(std::min(capacity, segment.entries) * ClusterCache::slot_bytes(1));
  ClusterCache cache(pool, budget, policy, layout.drives);
  cache.prepare(segment);
  cache.add(segment);
  if (score) {
    cache.fill(segment, fill.activations, fill.queries,
               tier_order(segment, fill.activations, layout.drives, *score),
               [](int32_t, int64_t) {});
  }
  std::vector<uint8_t> served;
  std::vector<int32_t> hits, misses;
  for (const auto& step : activated) {
    hits.clear();
    misses.clear();
    cache.touch(segment, step);
    for (const int32_t entry : step) {
      served.push_back(cache.find(segment, entry) >= 0);
      (served.back() ? hits : misses).push_back(entry);
    }
    for (const int32_t entry : hits) cache.pin(segment, entry);
    cache.admit(segment, misses, std::vector<int64_t>(misses.size(), 0));
    for (const int32_t entry : hits) cache.unpin(segment, entry);
  }
  return served;
}

}  // namespace swarm_kv
