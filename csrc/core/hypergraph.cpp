#include "core/hypergraph.h"

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "core/bisection.h"
#include "core/parallel.h"
#include "core/signature_distance.h"

namespace swarm_kv {
namespace {

constexpr int64_t kGrainClusters = 8;

using Cluster = std::vector<int32_t>;

class Signatures {
 public:
  Signatures(const uint64_t* bits, int64_t num_entries, int64_t words,
             const ClusterOptions& options)
      : bits_(bits),
        words_(words),
        distance_(options.distance, options.tau, bits, num_entries, words),
        popcounts_(num_entries) {
    for (int64_t i = 0; i < num_entries; ++i) {
      for (int64_t w = 0; w < words; ++w) popcounts_[i] += std::popcount(row(i)[w]);
    }
  }

  const uint64_t* bits() const { return bits_; }
  const uint64_t* row(int64_t entry) const { return bits_ + entry * words_; }
  int64_t words() const { return words_; }
  int32_t popcount(int64_t entry) const { return popcounts_[entry]; }

  // The sum of the distances of `entry` to the other `members`.
  double distance_to(int32_t entry, const Cluster& members) const {
    double sum = 0.0;
    for (const int32_t member : members) {
      if (member == entry) continue;
      int64_t common = 0;
      for (int64_t w = 0; w < words_; ++w) common += std::popcount(row(entry)[w] & row(member)[w]);
      sum += distance_(common, popcounts_[entry], popcounts_[member]);
    }
    return sum;
  }

 private:
  const uint64_t* bits_;
  int64_t words_;
  SignatureDistance distance_;
  std::vector<int32_t> popcounts_;
};

std::vector<Cluster> leaves(const Signatures& signatures, int64_t num_entries, int64_t max_leaf,
                            int64_t min_activation) {
  std::vector<int32_t> order;
  for (int64_t i = 0; i < num_entries; ++i) {
    if (signatures.popcount(i) >= min_activation) order.push_back(static_cast<int32_t>(i));
  }
  const auto ends = bisect(signatures.bits(), signatures.words(), max_leaf, order);
  std::vector<Cluster> clusters;
  int64_t begin = 0;
  for (const int64_t end : ends) {
    clusters.emplace_back(order.begin() + begin, order.begin() + end);
    begin = end;
  }
  return clusters;
}

void put_medoids_first(const Signatures& signatures, std::vector<Cluster>& clusters) {
  parallel_for(0, static_cast<int64_t>(clusters.size()), kGrainClusters,
               [&](int64_t first, int64_t last) {
                 for (int64_t c = first; c < last; ++c) {
                   Cluster& cluster = clusters[c];
                   std::vector<double> distances;
                   for (const int32_t member : cluster) {
                     distances.push_back(signatures.distance_to(member, cluster));
                   }
                   const auto medoid = std::min_element(distances.begin(), distances.end());
                   const auto at = cluster.begin() + (medoid - distances.begin());
                   std::rotate(cluster.begin(), at, at + 1);
                 }
               });
}

// The clusters, most activated members first, that fit into `max_bytes` of index.
void drop_what_does_not_fit(const Signatures& signatures, int64_t max_bytes,
                            std::vector<Cluster>& clusters) {
  const auto heat = [&](const Cluster& cluster) {
    int64_t sum = 0;
    for (const int32_t member : cluster) sum += signatures.popcount(member);
    return static_cast<double>(sum) / static_cast<double>(cluster.size());
  };
  std::vector<std::pair<double, size_t>> order;
  for (size_t c = 0; c < clusters.size(); ++c) order.emplace_back(-heat(clusters[c]), c);
  std::sort(order.begin(), order.end());
  int64_t bytes = 0;
  for (const auto& [heat, c] : order) {
    bytes += index_bytes(1, static_cast<int64_t>(clusters[c].size()));
    if (bytes > max_bytes) clusters[c].clear();
  }
  std::erase_if(clusters, [](const Cluster& cluster) { return cluster.empty(); });
}

}  // namespace

Clusters hypergraph_clusters(const int64_t* bits, int64_t num_entries, int64_t words,
                             const ClusterOptions& options) {
  check_options(num_entries, words, options);
  const Signatures signatures(reinterpret_cast<const uint64_t*>(bits), num_entries, words, options);
  std::vector<Cluster> clusters =
      leaves(signatures, num_entries, options.max_size, options.min_activation);
  put_medoids_first(signatures, clusters);
  // A cluster of one would cost the index an entry and save no read.
  std::erase_if(clusters, [](const Cluster& cluster) { return cluster.size() == 1; });
  if (options.max_index_bytes > 0) {
    drop_what_does_not_fit(signatures, options.max_index_bytes, clusters);
  }
  Clusters result;
  for (const Cluster& cluster : clusters) {
    result.members.insert(result.members.end(), cluster.begin(), cluster.end());
    result.offsets.push_back(static_cast<int32_t>(result.members.size()));
  }
  append_uncovered(options.cold, options.block, num_entries, result);
  return result;
}

}  // namespace swarm_kv
