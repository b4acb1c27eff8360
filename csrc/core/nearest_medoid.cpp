#include "core/nearest_medoid.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "core/candidate_search.h"
#include "core/hot_entries.h"
#include "core/signature_distance.h"

namespace swarm_kv {
namespace {

struct Home {
  int32_t medoid = -1;  // slot
  double distance = std::numeric_limits<double>::infinity();
};

std::vector<int32_t> by_density(const HotEntries& hot, const CandidateSearch& search) {
  const std::vector<int32_t> density = search.densities();
  std::vector<int32_t> order(hot.count());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return std::pair(-density[a], hot.id(a)) < std::pair(-density[b], hot.id(b));
  });
  return order;
}

void append_pieces(const std::vector<Candidate>& group, int64_t max_size, Clusters& clusters) {
  for (size_t begin = 0; begin < group.size();) {
    const size_t end = std::min(group.size(), begin + max_size);
    // One alone would cost the index an entry and save no read.
    if (end - begin > 1) {
      for (size_t i = begin; i < end; ++i) clusters.members.push_back(group[i].id);
      clusters.offsets.push_back(static_cast<int32_t>(clusters.members.size()));
    }
    begin = end;
  }
}

void gather(const HotEntries& hot, const CandidateSearch& search, int64_t max_size,
            Clusters& clusters) {
  const std::vector<bool> none_full(hot.count(), false);
  std::vector<Home> home(hot.count());
  std::vector<int32_t> medoids;
  std::vector<Candidate> candidates;
  for (const int32_t slot : by_density(hot, search)) {
    if (home[slot].medoid >= 0) continue;
    // Below any distance, so that the medoid comes first and stays.
    home[slot] = {slot, -1.0};
    medoids.push_back(slot);
    search.find(slot, none_full, candidates);
    for (const Candidate& candidate : candidates) {
      Home& old = home[candidate.slot];
      if (candidate.distance < old.distance) old = {slot, candidate.distance};
    }
  }
  std::vector<std::vector<Candidate>> groups(hot.count());
  for (int32_t slot = 0; slot < hot.count(); ++slot) {
    groups[home[slot].medoid].push_back({home[slot].distance, hot.id(slot), slot});
  }
  for (const int32_t medoid : medoids) {
    std::sort(groups[medoid].begin(), groups[medoid].end());
    append_pieces(groups[medoid], max_size, clusters);
  }
}

}  // namespace

Clusters nearest_medoid_clusters(const int64_t* bits, int64_t num_entries, int64_t words,
                                 const ClusterOptions& options) {
  check_options(num_entries, words, options);
  const auto* rows = reinterpret_cast<const uint64_t*>(bits);
  const SignatureDistance distance(options.distance, options.tau, rows, num_entries, words);
  Clusters clusters;
  const HotEntries hot(rows, num_entries, words, options.min_activation);
  const auto search = hot.count() <= kExactLimit ? exact_search(hot, distance)
                                                 : hashed_search(hot, distance, options.seed);
  gather(hot, *search, options.max_size, clusters);
  append_uncovered(options.cold, options.block, num_entries, clusters);
  return clusters;
}

}  // namespace swarm_kv
