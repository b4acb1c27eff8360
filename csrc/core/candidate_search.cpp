#include "core/candidate_search.h"

#include <algorithm>
#include <numeric>

#include "core/mix.h"
#include "core/parallel.h"
#include "core/popcount.h"
#include "core/signature_forest.h"
#include "core/simd.h"

namespace swarm_kv {
namespace {

// Blocks per tile: with 1024 queries a tile of signatures fills a first-level cache, to be used by
// many rows.
constexpr int64_t kTileBlocks = 32;
constexpr int64_t kDensityRows = 256;
constexpr int64_t kCacheLineWords = 8;
// Rows that are on their way from memory while one block of them is compared.
constexpr size_t kAhead = 2 * kLanes;

constexpr int64_t kTrees = 8;
// A medoid's candidates are at most 2 * kReach * kTrees.
constexpr int64_t kReach = 48;

// The rows that a hashed search compares lie anywhere.
void prefetch(const uint64_t* row, int64_t words) {
  for (int64_t w = 0; w < words; w += kCacheLineWords) __builtin_prefetch(row + w);
}

SWARM_KV_CLONES int32_t count_within(const int32_t* common, const int32_t* popcounts, int64_t count,
                                     const int32_t* thresholds) {
  int32_t within = 0;
  for (int64_t j = 0; j < count; ++j) within += common[j] >= thresholds[popcounts[j]] ? 1 : 0;
  return within;
}

// Adds to density[slot], for the slots [first, last) of one popcount, how many of `among` are
// within tau.
void count_neighbours(const HotEntries& hot, const SignatureBlocks& among,
                      const std::vector<int32_t>& thresholds, int64_t first, int64_t last,
                      int32_t* density) {
  const int32_t popcount = hot.popcount(first);
  const Range range = within_reach(among.popcounts(), popcount, thresholds);
  int32_t common[kTileBlocks * kLanes];
  for (int64_t tile = range.begin / kLanes; tile * kLanes < range.end; tile += kTileBlocks) {
    const int64_t begin = tile * kLanes;
    const int64_t count = std::min(range.end - begin, kTileBlocks * kLanes);
    for (int64_t slot = first; slot < last; ++slot) {
      count_common(hot.row(slot), among.block(tile), blocks_for(count), hot.words(), common);
      density[slot] +=
          count_within(common, among.popcounts().data() + begin, count, thresholds.data());
    }
  }
  if (popcount < thresholds[popcount]) return;
  for (int64_t slot = first; slot < last; ++slot) {
    density[slot] -= among.contains(static_cast<int32_t>(slot)) ? 1 : 0;  // itself
  }
}

// Per slot: how many others of `among` are within tau.
std::vector<int32_t> count_densities(const HotEntries& hot, const SignatureBlocks& among,
                                     const SignatureDistance& distance) {
  std::vector<int32_t> density(hot.count(), 0);
  parallel_for(0, hot.count(), kDensityRows, [&](int64_t first, int64_t last) {
    std::vector<int32_t> thresholds;
    while (first < last) {
      const int64_t end = std::upper_bound(hot.popcounts().begin() + first,
                                           hot.popcounts().begin() + last, hot.popcount(first)) -
                          hot.popcounts().begin();
      distance.thresholds(hot.popcount(first), hot.max_popcount(), thresholds);
      count_neighbours(hot, among, thresholds, first, end, density.data());
      first = end;
    }
  });
  return density;
}

std::vector<int32_t> all_slots(const HotEntries& hot) {
  std::vector<int32_t> slots(hot.count());
  std::iota(slots.begin(), slots.end(), 0);
  return slots;
}

// One slot out of each of `size` even stretches: of all popcounts, in proportion.
std::vector<int32_t> sample_slots(const HotEntries& hot, int64_t size, uint64_t seed) {
  if (hot.count() <= size) return all_slots(hot);
  std::vector<int32_t> slots(size);
  for (int64_t i = 0; i < size; ++i) {
    const int64_t begin = i * hot.count() / size;
    const int64_t end = (i + 1) * hot.count() / size;
    slots[i] = static_cast<int32_t>(begin + mix(seed + i * kMixStep) % (end - begin));
  }
  return slots;
}

class ExactSearch final : public CandidateSearch {
 public:
  ExactSearch(const HotEntries& hot, const SignatureDistance& distance)
      : hot_(hot), distance_(distance), all_(hot, all_slots(hot)) {}

  std::vector<int32_t> densities() const override { return count_densities(hot_, all_, distance_); }

  void find(int32_t medoid, const std::vector<bool>& full,
            std::vector<Candidate>& candidates) const override {
    const int32_t popcount = hot_.popcount(medoid);
    std::vector<int32_t> thresholds;
    distance_.thresholds(popcount, hot_.max_popcount(), thresholds);
    const Range range = within_reach(hot_.popcounts(), popcount, thresholds);
    const int64_t first = range.begin / kLanes;
    const int64_t begin = first * kLanes;
    std::vector<int32_t> common((blocks_for(range.end) - first) * kLanes);
    count_common(hot_.row(medoid), all_.block(first), blocks_for(range.end) - first, hot_.words(),
                 common.data());
    candidates.clear();
    for (int64_t slot = begin; slot < range.end; ++slot) {
      const int32_t f_ij = common[slot - begin];
      if (f_ij < thresholds[hot_.popcount(slot)]) continue;
      if (slot == medoid || full[slot]) continue;
      candidates.push_back({distance_(f_ij, popcount, hot_.popcount(slot)), hot_.id(slot),
                            static_cast<int32_t>(slot)});
    }
    std::sort(candidates.begin(), candidates.end());
  }

 private:
  const HotEntries& hot_;
  const SignatureDistance& distance_;
  SignatureBlocks all_;
};

class HashedSearch final : public CandidateSearch {
 public:
  HashedSearch(const HotEntries& hot, const SignatureDistance& distance, uint64_t seed)
      : hot_(hot), distance_(distance), seed_(seed), forest_(hot, kTrees, seed) {}

  std::vector<int32_t> densities() const override {
    const SignatureBlocks sample(hot_, sample_slots(hot_, kDensitySample, seed_));
    return count_densities(hot_, sample, distance_);
  }

  void find(int32_t medoid, const std::vector<bool>& full,
            std::vector<Candidate>& candidates) const override {
    const int32_t popcount = hot_.popcount(medoid);
    std::vector<int32_t> thresholds;
    distance_.thresholds(popcount, hot_.max_popcount(), thresholds);
    std::vector<int32_t> slots;
    forest_.neighbours(medoid, kReach, within_reach(hot_.popcounts(), popcount, thresholds), full,
                       slots);
    candidates.clear();
    std::vector<uint64_t> block(hot_.words() * kLanes);
    for (size_t first = 0; first < slots.size(); first += kLanes) {
      for (size_t i = first + kAhead; i < std::min(first + kAhead + kLanes, slots.size()); ++i) {
        prefetch(hot_.row(slots[i]), hot_.words());
      }
      const size_t lanes = std::min<size_t>(kLanes, slots.size() - first);
      for (size_t l = 0; l < lanes; ++l) {
        copy_to_blocks(hot_.row(slots[first + l]), hot_.words(), l, block.data());
      }
      int32_t common[kLanes];
      count_common(hot_.row(medoid), block.data(), 1, hot_.words(), common);
      for (size_t l = 0; l < lanes; ++l) {
        const int32_t slot = slots[first + l];
        if (common[l] < thresholds[hot_.popcount(slot)]) continue;
        candidates.push_back(
            {distance_(common[l], popcount, hot_.popcount(slot)), hot_.id(slot), slot});
      }
    }
    std::sort(candidates.begin(), candidates.end());
  }

 private:
  const HotEntries& hot_;
  const SignatureDistance& distance_;
  uint64_t seed_;
  SignatureForest forest_;
};

}  // namespace

std::unique_ptr<CandidateSearch> exact_search(const HotEntries& hot,
                                              const SignatureDistance& distance) {
  return std::make_unique<ExactSearch>(hot, distance);
}

std::unique_ptr<CandidateSearch> hashed_search(const HotEntries& hot,
                                               const SignatureDistance& distance, uint64_t seed) {
  return std::make_unique<HashedSearch>(hot, distance, seed);
}

}  // namespace swarm_kv
