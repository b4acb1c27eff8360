#include "ops/cpu/selection.h"

#include <algorithm>
#include <bit>
#include <functional>

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

// Yields keys in descending order. Only the ones that are asked for get sorted: O(n) to build,
// O(log n) each.
class LazyRanking {
 public:
  explicit LazyRanking(std::vector<uint64_t> keys) : heap_(std::move(keys)) {
    std::make_heap(heap_.begin(), heap_.end());
  }
  bool empty() const { return heap_.empty(); }
  uint64_t pop() {
    std::pop_heap(heap_.begin(), heap_.end());
    const uint64_t key = heap_.back();
    heap_.pop_back();
    return key;
  }
  void push(uint64_t key) {
    heap_.push_back(key);
    std::push_heap(heap_.begin(), heap_.end());
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

// The `count` entries of highest probability outside `taken` (ties: lower id), ascending. A
// histogram over the leading bits of the keys leaves only few of them to be compared.
std::vector<int64_t> strongest_outside(const float* probs, int64_t entries, const TakenSet& taken,
                                       int64_t count) {
  constexpr int kBits = 14;  // sign, exponent, and steps of a thirty-second
  const auto bin_of = [](uint64_t key) { return key >> (64 - kBits); };
  std::vector<int32_t> bins(1 << kBits, 0);
  for (int64_t entry = 0; entry < entries; ++entry) {
    if (!taken.contains(entry)) ++bins[bin_of(ranking_key(probs[entry], entry))];
  }
  uint64_t lowest = bins.size();
  int64_t held = 0;
  while (held < count && lowest > 0) held += bins[--lowest];
  std::vector<uint64_t> keys;
  keys.reserve(held);
  for (int64_t entry = 0; entry < entries; ++entry) {
    if (taken.contains(entry)) continue;
    const uint64_t key = ranking_key(probs[entry], entry);
    if (bin_of(key) >= lowest) keys.push_back(key);
  }
  count = std::min(count, held);
  std::nth_element(keys.begin(), keys.begin() + count, keys.end(), std::greater<>());
  std::vector<int64_t> result(count);
  std::transform(keys.begin(), keys.begin() + count, result.begin(), ranked_id);
  std::sort(result.begin(), result.end());
  return result;
}

// What reading cluster `c` now brings per cost; 0 where it brings nothing.
float gain_of(const float* probs, const ClusterLists& clusters, int64_t c, const TakenSet& taken,
              double request_cost) {
  const int64_t first = clusters.offsets[c], last = clusters.offsets[c + 1];
  double mass = 0;
  for (int64_t i = first; i < last; ++i) {
    const int32_t entry = clusters.members[i];
    mass += taken.contains(entry) ? 0.0f : probs[entry];
  }
  return mass == 0 ? 0.0f
                   : static_cast<float>(mass / (request_cost + static_cast<double>(last - first)));
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
    result.push_back(ranked_id(ranking.pop()));
    taken.take(clusters, result.back());
  }
  return result;
}

TwoLevelSelection select_two_level(const float* probs, const ClusterLists& clusters, int64_t budget,
                                   double request_cost, double single_share) {
  const int64_t cluster_budget =
      budget - static_cast<int64_t>(single_share * static_cast<double>(budget));
  TakenSet taken(clusters.entries);
  std::vector<uint64_t> keys;
  if (cluster_budget > 0) {
    keys.reserve(clusters.count);
    for (int64_t c = 0; c < clusters.count; ++c) {
      const float gain = gain_of(probs, clusters, c, taken, request_cost);
      if (gain > 0) keys.push_back(ranking_key(gain, c));
    }
  }
  LazyRanking ranking(std::move(keys));
  TwoLevelSelection result;
  while (taken.count() < cluster_budget && !ranking.empty()) {
    const uint64_t key = ranking.pop();
    const int64_t cluster = ranked_id(key);
    // Gains only fall while entries are taken, so one that has not fallen is still the greatest.
    const float gain = gain_of(probs, clusters, cluster, taken, request_cost);
    const uint64_t now = ranking_key(gain, cluster);
    if (now == key) {
      taken.take(clusters, cluster);
      result.clusters.push_back(cluster);
    } else if (gain > 0) {
      ranking.push(now);
    }
  }
  if (taken.count() < budget) {
    result.entries = strongest_outside(probs, clusters.entries, taken, budget - taken.count());
  }
  return result;
}

}  // namespace swarm_kv::cpu
