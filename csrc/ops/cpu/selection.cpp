#include "ops/cpu/selection.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace swarm_kv::cpu {
namespace {

// An id under its score in one integer whose order is: higher score first, then lower id. Comparing
// these is far cheaper than looking scores up. Ids are below 2^32.
uint64_t ranking_key(float score, int64_t id) {
  const uint32_t bits = std::bit_cast<uint32_t>(score + 0.0f);  // -0 becomes 0
  const uint32_t ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | static_cast<uint32_t>(~static_cast<uint32_t>(id));
}

int64_t ranked_id(uint64_t key) { return static_cast<uint32_t>(~static_cast<uint32_t>(key)); }

// Yields ids by descending key. Only the ids that are asked for get sorted: O(n) to build, O(log n)
// each.
class LazyRanking {
 public:
  explicit LazyRanking(std::vector<uint64_t> keys) : heap_(std::move(keys)) {
    std::make_heap(heap_.begin(), heap_.end());
  }
  bool empty() const { return heap_.empty(); }
  int64_t next() {
    std::pop_heap(heap_.begin(), heap_.end());
    const int64_t id = ranked_id(heap_.back());
    heap_.pop_back();
    return id;
  }

 private:
  std::vector<uint64_t> heap_;
};

// Entries taken so far.
class TakenSet {
 public:
  explicit TakenSet(int64_t entries) : taken_(entries, 0) {}
  bool contains(int64_t entry) const { return taken_[entry] != 0; }
  int64_t count() const { return count_; }

  // How many of the cluster's members are not yet taken.
  int64_t count_new(const ClusterLists& clusters, int64_t cluster) const {
    int64_t fresh = 0;
    for (int64_t i = clusters.offsets[cluster]; i < clusters.offsets[cluster + 1]; ++i) {
      fresh += taken_[clusters.members[i]] == 0;
    }
    return fresh;
  }

  void take(const ClusterLists& clusters, int64_t cluster) {
    for (int64_t i = clusters.offsets[cluster]; i < clusters.offsets[cluster + 1]; ++i) {
      uint8_t& taken = taken_[clusters.members[i]];
      count_ += taken == 0;
      taken = 1;
    }
  }

 private:
  std::vector<uint8_t> taken_;
  int64_t count_ = 0;
};

// The `count` entries of highest probability outside `taken` (ties: lower id), ascending.
std::vector<int64_t> strongest_outside(const float* probs, int64_t entries, const TakenSet& taken,
                                       int64_t count) {
  std::vector<uint64_t> keys;
  keys.reserve(entries - taken.count());
  for (int64_t entry = 0; entry < entries; ++entry) {
    if (!taken.contains(entry)) keys.push_back(ranking_key(probs[entry], entry));
  }
  count = std::min(count, static_cast<int64_t>(keys.size()));
  std::nth_element(keys.begin(), keys.begin() + count, keys.end(), std::greater<>());
  std::vector<int64_t> result(count);
  std::transform(keys.begin(), keys.begin() + count, result.begin(), ranked_id);
  std::sort(result.begin(), result.end());
  return result;
}

}  // namespace

std::vector<int64_t> select_clusters(const float* scores, const ClusterLists& clusters,
                                     int64_t budget) {
  std::vector<uint64_t> keys(clusters.count);
  for (int64_t c = 0; c < clusters.count; ++c) keys[c] = ranking_key(scores[c], c);
  LazyRanking ranking(std::move(keys));
  TakenSet taken(clusters.entries);
  std::vector<int64_t> result;
  while (taken.count() < budget && !ranking.empty()) {
    result.push_back(ranking.next());
    taken.take(clusters, result.back());
  }
  return result;
}

TwoLevelSelection select_two_level(const float* probs, const ClusterLists& clusters, int64_t budget,
                                   double request_cost, double single_share) {
  std::vector<uint64_t> keys;
  keys.reserve(clusters.count);
  for (int64_t c = 0; c < clusters.count; ++c) {
    const int64_t first = clusters.offsets[c], last = clusters.offsets[c + 1];
    double mass = 0;
    for (int64_t i = first; i < last; ++i) mass += probs[clusters.members[i]];
    const double cost = request_cost + static_cast<double>(last - first);
    if (last > first) keys.push_back(ranking_key(static_cast<float>(mass / cost), c));
  }
  const int64_t cluster_budget =
      budget - static_cast<int64_t>(single_share * static_cast<double>(budget));
  LazyRanking ranking(std::move(keys));
  TakenSet taken(clusters.entries);
  TwoLevelSelection result;
  while (taken.count() < cluster_budget && !ranking.empty()) {
    const int64_t cluster = ranking.next();
    const int64_t size = clusters.offsets[cluster + 1] - clusters.offsets[cluster];
    if (2 * taken.count_new(clusters, cluster) < size) continue;
    taken.take(clusters, cluster);
    result.clusters.push_back(cluster);
  }
  if (taken.count() < budget) {
    result.entries = strongest_outside(probs, clusters.entries, taken, budget - taken.count());
  }
  return result;
}

}  // namespace swarm_kv::cpu
