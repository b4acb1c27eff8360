#include "core/clustering.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>

#include "core/parallel.h"
#include "core/simd.h"
#include "io/error.h"

#ifdef SWARM_KV_HAS_CLONES
#include <immintrin.h>
#endif

namespace swarm_kv {
namespace {

// Signatures are compared one against a block of kLanes, stored [words][kLanes], so that lanes are
// vector lanes.
constexpr int64_t kLanes = 8;
// Blocks per tile: with 1024 queries a tile of signatures fills a first-level cache, to be used by
// many rows.
constexpr int64_t kTileBlocks = 32;
constexpr int64_t kTileEntries = kTileBlocks * kLanes;
constexpr int64_t kDensityRows = 256;
// One medoid's row is split between threads in pieces of this many words of every lane; less would
// not pay for a thread.
constexpr int64_t kRowWords = 65536;

SWARM_KV_CLONES void count_common_portable(const uint64_t* row, const uint64_t* blocks,
                                           int64_t num_blocks, int64_t words, int32_t* common) {
  for (int64_t b = 0; b < num_blocks; ++b) {
    const uint64_t* block = blocks + b * words * kLanes;
    uint64_t sum[kLanes] = {};
    for (int64_t w = 0; w < words; ++w) {
      for (int l = 0; l < kLanes; ++l) {
        sum[l] += static_cast<uint64_t>(std::popcount(row[w] & block[w * kLanes + l]));
      }
    }
    for (int l = 0; l < kLanes; ++l) common[b * kLanes + l] = static_cast<int32_t>(sum[l]);
  }
}

#ifdef SWARM_KV_HAS_CLONES
// The x86 extension that counts bits in vectors has no level that target_clones could name, and
// compilers vectorise the loop above across words, with more shuffles than counts.
__attribute__((target("avx512f,avx512vpopcntdq"))) void count_common_vpopcntdq(
    const uint64_t* row, const uint64_t* blocks, int64_t num_blocks, int64_t words,
    int32_t* common) {
  for (int64_t b = 0; b < num_blocks; ++b) {
    const uint64_t* block = blocks + b * words * kLanes;
    __m512i sum = _mm512_setzero_si512();
    for (int64_t w = 0; w < words; ++w) {
      const __m512i shared = _mm512_and_si512(_mm512_set1_epi64(static_cast<int64_t>(row[w])),
                                              _mm512_loadu_si512(block + w * kLanes));
      sum = _mm512_add_epi64(sum, _mm512_popcnt_epi64(shared));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(common + b * kLanes),
                        _mm512_maskz_cvtepi64_epi32(0xff, sum));
  }
}

const bool kHasVectorPopcount = __builtin_cpu_supports("avx512vpopcntdq") != 0;
#endif

// common[b * kLanes + l] = bits that `row` shares with lane l of block b.
void count_common(const uint64_t* row, const uint64_t* blocks, int64_t num_blocks, int64_t words,
                  int32_t* common) {
#ifdef SWARM_KV_HAS_CLONES
  if (kHasVectorPopcount) return count_common_vpopcntdq(row, blocks, num_blocks, words, common);
#endif
  count_common_portable(row, blocks, num_blocks, words, common);
}

// Adds 1 to density[j] for each of `count` entries within tau; returns how many there are.
// `threshold` points at the row's own popcount, so that indexing it by an entry's popcount looks up
// their sum.
SWARM_KV_CLONES int32_t add_neighbours(const int32_t* common, const int32_t* popcounts,
                                       const int32_t* threshold, int64_t count,
                                       int32_t* __restrict density) {
  int32_t neighbours = 0;
  for (int64_t j = 0; j < count; ++j) {
    const int32_t within = common[j] >= threshold[popcounts[j]] ? 1 : 0;
    density[j] += within;
    neighbours += within;
  }
  return neighbours;
}

// threshold[f_i + f_j]: the least f_ij with signature_distance <= tau, or more than f_ij can be.
// Exactly what comparing distances gives, without a division per pair; it never falls as the sum
// grows.
std::vector<int32_t> distance_thresholds(double tau, int64_t max_popcount) {
  std::vector<int32_t> threshold(2 * max_popcount + 1, 0);
  for (int64_t sum = 1; sum <= 2 * max_popcount; ++sum) {
    int64_t common = threshold[sum - 1];
    while (2 * common <= sum && signature_distance(common, 0, sum) > tau) ++common;
    threshold[sum] = static_cast<int32_t>(common);
  }
  return threshold;
}

void copy_to_lane(const uint64_t* row, int64_t words, int64_t lane, uint64_t* block) {
  for (int64_t w = 0; w < words; ++w) block[w * kLanes + lane] = row[w];
}

// The entries that are not cold, in "slots" of ascending popcount (ties: ascending id). By
// Jaccard's bound, d >= 1 - min(f) / max(f), what lies within tau of a slot is in a contiguous
// range of slots.
class HotEntries {
 public:
  HotEntries(const uint64_t* bits, int64_t num_entries, int64_t words,
             const ClusterOptions& options)
      : bits_(bits), words_(words), threshold_(distance_thresholds(options.tau, words * 64)) {
    std::vector<int32_t> popcounts(num_entries);
    parallel_for(0, num_entries, 4096, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        int32_t sum = 0;
        for (int64_t w = 0; w < words; ++w) sum += std::popcount(row(i)[w]);
        popcounts[i] = sum;
      }
    });
    for (int64_t i = 0; i < num_entries; ++i) {
      if (popcounts[i] >= options.min_activation) id_.push_back(static_cast<int32_t>(i));
    }
    std::stable_sort(id_.begin(), id_.end(),
                     [&](int32_t a, int32_t b) { return popcounts[a] < popcounts[b]; });
    popcount_.resize(num_blocks() * kLanes, 0);
    for (int64_t slot = 0; slot < count(); ++slot) popcount_[slot] = popcounts[id_[slot]];
    blocks_.resize(num_blocks() * words * kLanes, 0);
    parallel_for(0, num_blocks(), 512, [&](int64_t first, int64_t last) {
      for (int64_t slot = first * kLanes; slot < std::min(last * kLanes, count()); ++slot) {
        copy_to_lane(row(id_[slot]), words_, slot % kLanes,
                     blocks_.data() + slot / kLanes * words_ * kLanes);
      }
    });
  }

  int64_t count() const { return static_cast<int64_t>(id_.size()); }
  int64_t num_blocks() const { return (count() + kLanes - 1) / kLanes; }
  int64_t words() const { return words_; }
  int32_t id(int64_t slot) const { return id_[slot]; }
  int32_t popcount(int64_t slot) const { return popcount_[slot]; }
  const uint64_t* row(int64_t id) const { return bits_ + id * words_; }
  const uint64_t* block(int64_t block) const { return blocks_.data() + block * words_ * kLanes; }
  const int32_t* popcounts() const { return popcount_.data(); }
  const int32_t* thresholds(int64_t slot) const { return threshold_.data() + popcount_[slot]; }

  // The range of slots that can be within tau of `slot`.
  int64_t range_begin(int64_t slot) const {
    const int32_t* threshold = thresholds(slot);
    return std::partition_point(popcount_.begin(), popcount_.begin() + slot,
                                [&](int32_t f) { return threshold[f] > f; }) -
           popcount_.begin();
  }
  int64_t range_end(int64_t slot) const {
    const int32_t* threshold = thresholds(slot);
    return std::partition_point(popcount_.begin() + slot, popcount_.begin() + count(),
                                [&](int32_t f) { return threshold[f] <= popcount_[slot]; }) -
           popcount_.begin();
  }

 private:
  const uint64_t* bits_;
  int64_t words_;
  std::vector<int32_t> threshold_;
  std::vector<int32_t> id_;        // [count]
  std::vector<int32_t> popcount_;  // [count, padded to a block]
  std::vector<uint64_t> blocks_;   // [num_blocks][words][kLanes]
};

// Neighbours of rows [first, last) among later slots, added to both sides of each pair.
void add_densities(const HotEntries& hot, int64_t first, int64_t last,
                   std::vector<int32_t>& density) {
  std::vector<int64_t> ends(last - first);
  for (int64_t row = first; row < last; ++row) ends[row - first] = hot.range_end(row);
  int32_t common[kTileEntries];
  for (int64_t tile = first / kLanes; tile * kLanes < ends.back(); tile += kTileBlocks) {
    const int64_t tile_begin = tile * kLanes;
    for (int64_t row = first; row < last; ++row) {
      const int64_t begin = std::max(row + 1, tile_begin);
      const int64_t end = std::min(ends[row - first], tile_begin + kTileEntries);
      if (begin >= end) continue;
      const int64_t first_block = begin / kLanes;
      const int64_t last_block = (end - 1) / kLanes + 1;
      count_common(hot.row(hot.id(row)), hot.block(first_block), last_block - first_block,
                   hot.words(), common);
      density[row] +=
          add_neighbours(common + (begin - first_block * kLanes), hot.popcounts() + begin,
                         hot.thresholds(row), end - begin, density.data() + begin);
    }
  }
}

// Per slot: how many other slots lie within tau.
std::vector<int32_t> densities(const HotEntries& hot) {
  std::vector<int32_t> total(hot.count(), 0);
  std::mutex mutex;
  parallel_for(0, hot.count(), kDensityRows, [&](int64_t first, int64_t last) {
    std::vector<int32_t> part(hot.count(), 0);
    add_densities(hot, first, last, part);
    const std::lock_guard lock(mutex);
    for (int64_t slot = first; slot < hot.count(); ++slot) total[slot] += part[slot];
  });
  return total;
}

// The signatures of the cluster that is growing, in blocks for count_common.
class GrowingCluster {
 public:
  explicit GrowingCluster(const HotEntries& hot) : hot_(hot) {}

  void start(int64_t medoid) {
    slots_.clear();
    add(medoid);
  }

  void add(int64_t slot) {
    const int64_t position = size();
    const int64_t block_words = hot_.words() * kLanes;
    blocks_.resize(std::max<size_t>(blocks_.size(), (position / kLanes + 1) * block_words));
    copy_to_lane(hot_.row(hot_.id(slot)), hot_.words(), position % kLanes,
                 blocks_.data() + position / kLanes * block_words);
    slots_.push_back(slot);
  }

  // Eq. 5: whether the mean distance of `slot` to the members is within tau.
  bool accepts(int64_t slot, double tau) {
    const int64_t num_blocks = (size() + kLanes - 1) / kLanes;
    common_.resize(num_blocks * kLanes);
    count_common(hot_.row(hot_.id(slot)), blocks_.data(), num_blocks, hot_.words(), common_.data());
    double sum = 0.0;
    for (int64_t i = 0; i < size(); ++i) {
      sum += signature_distance(common_[i], hot_.popcount(slot), hot_.popcount(slots_[i]));
    }
    return sum <= tau * static_cast<double>(size());
  }

  int64_t size() const { return static_cast<int64_t>(slots_.size()); }
  const std::vector<int64_t>& slots() const { return slots_; }

 private:
  const HotEntries& hot_;
  std::vector<int64_t> slots_;
  std::vector<uint64_t> blocks_;
  std::vector<int32_t> common_;
};

struct Candidate {
  double distance;
  int32_t id;
  int32_t slot;

  bool operator<(const Candidate& other) const {
    return std::pair(distance, id) < std::pair(other.distance, other.id);
  }
};

// The nearest kMaxGrowthCandidates slots within tau of `medoid` that may take another copy, in
// ascending distance. `common` [padded slots] is scratch.
void find_candidates(const HotEntries& hot, int64_t medoid, const std::vector<int32_t>& copies,
                     int64_t max_replicas, std::vector<int32_t>& common,
                     std::vector<Candidate>& candidates) {
  const int64_t begin = hot.range_begin(medoid);
  const int64_t end = hot.range_end(medoid);
  const int64_t grain = std::max<int64_t>(1, kRowWords / hot.words());
  parallel_for(begin / kLanes, (end - 1) / kLanes + 1, grain, [&](int64_t first, int64_t last) {
    count_common(hot.row(hot.id(medoid)), hot.block(first), last - first, hot.words(),
                 common.data() + first * kLanes);
  });
  candidates.clear();
  const int32_t* threshold = hot.thresholds(medoid);
  for (int64_t slot = begin; slot < end; ++slot) {
    if (common[slot] < threshold[hot.popcount(slot)]) continue;
    if (slot == medoid || copies[slot] >= max_replicas) continue;
    candidates.push_back(
        {signature_distance(common[slot], hot.popcount(medoid), hot.popcount(slot)), hot.id(slot),
         static_cast<int32_t>(slot)});
  }
  if (static_cast<int64_t>(candidates.size()) > kMaxGrowthCandidates) {
    std::nth_element(candidates.begin(), candidates.begin() + kMaxGrowthCandidates,
                     candidates.end());
    candidates.resize(kMaxGrowthCandidates);
  }
  std::sort(candidates.begin(), candidates.end());
}

void append_cluster(Clusters& clusters) {
  clusters.offsets.push_back(static_cast<int64_t>(clusters.members.size()));
}

void grow_clusters(const HotEntries& hot, const ClusterOptions& options, Clusters& clusters) {
  const std::vector<int32_t> density = densities(hot);
  std::vector<int32_t> order(hot.count());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return std::pair(-density[a], hot.id(a)) < std::pair(-density[b], hot.id(b));
  });

  std::vector<int32_t> copies(hot.count(), 0);
  std::vector<int32_t> common(hot.num_blocks() * kLanes);
  std::vector<Candidate> candidates;
  GrowingCluster cluster(hot);
  for (const int32_t medoid : order) {
    if (copies[medoid] > 0) continue;
    cluster.start(medoid);
    candidates.clear();
    if (density[medoid] > 0 && options.max_size > 1) {
      find_candidates(hot, medoid, copies, options.max_replicas, common, candidates);
    }
    for (const Candidate& candidate : candidates) {
      if (cluster.size() >= options.max_size) break;
      if (cluster.accepts(candidate.slot, options.tau)) cluster.add(candidate.slot);
    }
    for (const int64_t slot : cluster.slots()) {
      ++copies[slot];
      clusters.members.push_back(hot.id(slot));
    }
    append_cluster(clusters);
  }
}

[[noreturn]] void fail(const std::string& message) {
  throw Error(ErrorKind::kArgument, "cluster: " + message);
}

void check(int64_t num_entries, int64_t words, const ClusterOptions& options) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  if (num_entries < 0 || num_entries > kMax) {
    fail("num_entries must be in [0, 2^31), got " + std::to_string(num_entries));
  }
  if (words < 0 || words > kMax / 128) {
    fail("words must be in [0, 2^24), got " + std::to_string(words));
  }
  if (!(options.tau >= 0.0 && options.tau <= 1.0)) {
    fail("tau must be in [0, 1], got " + std::to_string(options.tau));
  }
  if (options.max_size < 1) {
    fail("max_size must be at least 1, got " + std::to_string(options.max_size));
  }
  if (options.max_replicas < 1) {
    fail("max_replicas must be at least 1, got " + std::to_string(options.max_replicas));
  }
  if (options.min_activation < 1) {
    fail("min_activation must be at least 1, got " + std::to_string(options.min_activation));
  }
}

}  // namespace

Clusters cluster_signatures(const int64_t* bits, int64_t num_entries, int64_t words,
                            const ClusterOptions& options) {
  check(num_entries, words, options);
  Clusters clusters;
  const HotEntries hot(reinterpret_cast<const uint64_t*>(bits), num_entries, words, options);
  grow_clusters(hot, options, clusters);

  std::vector<bool> is_hot(num_entries, false);
  for (int64_t slot = 0; slot < hot.count(); ++slot) is_hot[hot.id(slot)] = true;
  for (int64_t i = 0; i < num_entries; ++i) {
    if (is_hot[i]) continue;
    clusters.members.push_back(i);
    append_cluster(clusters);
  }
  return clusters;
}

Clusters sequence_blocks(int64_t num_entries, int64_t block) {
  if (num_entries < 0) {
    fail("num_entries must be at least 0, got " + std::to_string(num_entries));
  }
  if (block < 1) fail("block must be at least 1, got " + std::to_string(block));
  Clusters clusters;
  clusters.members.resize(num_entries);
  std::iota(clusters.members.begin(), clusters.members.end(), 0);
  for (int64_t end = 0; end < num_entries;) {
    end += std::min(block, num_entries - end);
    clusters.offsets.push_back(end);
  }
  return clusters;
}

}  // namespace swarm_kv
