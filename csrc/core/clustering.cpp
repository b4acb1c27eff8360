#include "core/clustering.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/candidate_search.h"
#include "core/hot_entries.h"
#include "core/parallel.h"
#include "core/popcount.h"
#include "core/signature_distance.h"
#include "io/error.h"

namespace swarm_kv {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
// Medoids whose candidates are looked up at once; those that a cluster before them covers are
// looked up in vain. Fixed, so that the result does not depend on the number of threads.
constexpr int64_t kBatchMedoids = 64;

[[noreturn]] void fail(const std::string& message) {
  throw Error(ErrorKind::kArgument, "cluster: " + message);
}

enum class Cold { kCoded, kPacked, kSingle };

Cold cold_by_name(const std::string& name) {
  if (name == "coded") return Cold::kCoded;
  if (name == "packed") return Cold::kPacked;
  if (name == "single") return Cold::kSingle;
  fail("unknown `cold` \"" + name + "\"; choose one of: coded, packed, single");
}

// The cluster that is growing, with its signatures in blocks for count_common.
class GrowingCluster {
 public:
  explicit GrowingCluster(const HotEntries& hot, const SignatureDistance& distance)
      : hot_(hot), distance_(distance) {}

  void start(int32_t medoid) {
    slots_.clear();
    popcounts_.clear();
    add(medoid);
  }

  void add(int32_t slot) {
    const int64_t block_words = hot_.words() * kLanes;
    blocks_.resize(std::max<size_t>(blocks_.size(), blocks_for(size() + 1) * block_words));
    copy_to_blocks(hot_.row(slot), hot_.words(), size(), blocks_.data());
    slots_.push_back(slot);
    popcounts_.push_back(hot_.popcount(slot));
  }

  // Eq. 5: whether the mean distance of `slot` to the members is within tau.
  bool accepts(int32_t slot) {
    common_.resize(blocks_for(size()) * kLanes);
    distances_.resize(common_.size());
    count_common(hot_.row(slot), blocks_.data(), blocks_for(size()), hot_.words(), common_.data());
    const double sum = distance_.sum(common_.data(), hot_.popcount(slot), popcounts_.data(), size(),
                                     distances_.data());
    return sum <= distance_.tau() * static_cast<double>(size());
  }

  int64_t size() const { return static_cast<int64_t>(slots_.size()); }
  const std::vector<int32_t>& slots() const { return slots_; }

 private:
  const HotEntries& hot_;
  const SignatureDistance& distance_;
  std::vector<int32_t> slots_;
  std::vector<int32_t> popcounts_;
  std::vector<uint64_t> blocks_;
  std::vector<int32_t> common_;
  std::vector<double> distances_;
};

class Algorithm1 {
 public:
  Algorithm1(const HotEntries& hot, const SignatureDistance& distance,
             const CandidateSearch& search, const ClusterOptions& options, int64_t max_members)
      : hot_(hot),
        search_(search),
        options_(options),
        max_members_(max_members),
        copies_(hot.count(), 0),
        full_(hot.count(), false),
        cluster_(hot, distance) {}

  // Appends the clusters of two members or more to `clusters`.
  void run(Clusters& clusters) {
    const std::vector<int32_t> order = medoid_order();
    std::vector<int32_t> medoids;
    std::vector<std::vector<Candidate>> candidates(kBatchMedoids);
    for (size_t next = 0; next < order.size();) {
      medoids.clear();
      for (; next < order.size() && medoids.size() < candidates.size(); ++next) {
        if (copies_[order[next]] == 0) medoids.push_back(order[next]);
      }
      parallel_for(0, static_cast<int64_t>(medoids.size()), 1,
                   [&](int64_t i, int64_t) { search_.find(medoids[i], full_, candidates[i]); });
      for (size_t i = 0; i < medoids.size(); ++i) {
        if (copies_[medoids[i]] > 0) continue;
        grow(medoids[i], candidates[i]);
        if (cluster_.size() == 1) continue;
        if (!fits(clusters)) return;
        append(clusters);
      }
    }
  }

 private:
  // Slots by descending density (ties: lower id).
  std::vector<int32_t> medoid_order() const {
    const std::vector<int32_t> density = search_.densities();
    std::vector<int32_t> order(hot_.count());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return std::pair(-density[a], hot_.id(a)) < std::pair(-density[b], hot_.id(b));
    });
    return order;
  }

  void grow(int32_t medoid, const std::vector<Candidate>& candidates) {
    cluster_.start(medoid);
    int64_t tried = 0;
    for (const Candidate& candidate : candidates) {
      if (cluster_.size() >= options_.max_size || tried >= kMaxGrowthCandidates) return;
      // Clusters of the same batch may have taken it meanwhile.
      if (full_[candidate.slot]) continue;
      ++tried;
      if (cluster_.accepts(candidate.slot)) cluster_.add(candidate.slot);
    }
  }

  bool fits(const Clusters& clusters) const {
    const auto members = static_cast<int64_t>(clusters.members.size()) + cluster_.size();
    if (members > max_members_) return false;
    return options_.max_index_bytes == 0 ||
           index_bytes(clusters.count() + 1, members) <= options_.max_index_bytes;
  }

  void append(Clusters& clusters) {
    for (const int32_t slot : cluster_.slots()) {
      if (++copies_[slot] >= options_.max_replicas) full_[slot] = true;
      clusters.members.push_back(hot_.id(slot));
    }
    clusters.offsets.push_back(static_cast<int32_t>(clusters.members.size()));
  }

  const HotEntries& hot_;
  const CandidateSearch& search_;
  const ClusterOptions& options_;
  const int64_t max_members_;
  std::vector<int32_t> copies_;  // [slots]
  std::vector<bool> full_;       // [slots] with max_replicas copies
  GrowingCluster cluster_;
};

}  // namespace

void check_options(int64_t num_entries, int64_t words, const ClusterOptions& options) {
  if (num_entries < 0 || num_entries > kMaxInt32) {
    fail("num_entries must be in [0, 2^31), got " + std::to_string(num_entries));
  }
  if (words < 0 || words > kMaxInt32 / 128) {
    fail("words must be in [0, 2^24), got " + std::to_string(words));
  }
  if (!(options.tau >= 0.0 && options.tau <= 1.0)) {
    fail("tau must be in [0, 1], got " + std::to_string(options.tau));
  }
  for (const auto& [name, value, least] : {std::tuple("max_size", options.max_size, 1),
                                           {"max_replicas", options.max_replicas, 1},
                                           {"min_activation", options.min_activation, 1},
                                           {"block", options.block, 1},
                                           {"max_index_bytes", options.max_index_bytes, 0}}) {
    if (value < least) {
      fail(std::string(name) + " must be at least " + std::to_string(least) + ", got " +
           std::to_string(value));
    }
  }
  cold_by_name(options.cold);
}

void append_uncovered(const std::string& cold, int64_t block, int64_t num_entries,
                      Clusters& clusters) {
  const Cold kind = cold_by_name(cold);
  std::vector<bool> covered(num_entries, false);
  for (const int32_t member : clusters.members) covered[member] = true;
  for (int64_t i = 0; i < num_entries; ++i) {
    if (!covered[i]) clusters.members.push_back(static_cast<int32_t>(i));
  }
  if (kind == Cold::kCoded) return;
  if (kind == Cold::kSingle) block = 1;
  while (clusters.loose() > 0) {
    clusters.offsets.push_back(clusters.offsets.back() +
                               static_cast<int32_t>(std::min(block, clusters.loose())));
  }
}

Clusters cluster_signatures(const int64_t* bits, int64_t num_entries, int64_t words,
                            const ClusterOptions& options, int64_t exact_limit) {
  check_options(num_entries, words, options);
  const auto* rows = reinterpret_cast<const uint64_t*>(bits);
  const SignatureDistance distance(options.distance, options.tau, rows, num_entries, words);
  Clusters clusters;
  {
    const HotEntries hot(rows, num_entries, words, options.min_activation);
    const auto search = hot.count() <= exact_limit ? exact_search(hot, distance)
                                                   : hashed_search(hot, distance, options.seed);
    // Whatever is left has to fit too.
    Algorithm1(hot, distance, *search, options, kMaxInt32 - num_entries).run(clusters);
  }
  append_uncovered(options.cold, options.block, num_entries, clusters);
  return clusters;
}

Clusters sequence_blocks(int64_t num_entries, int64_t block) {
  if (num_entries < 0) {
    fail("num_entries must be at least 0, got " + std::to_string(num_entries));
  }
  if (block < 1) fail("block must be at least 1, got " + std::to_string(block));
  Clusters clusters;
  append_uncovered("packed", block, num_entries, clusters);
  return clusters;
}

}  // namespace swarm_kv
