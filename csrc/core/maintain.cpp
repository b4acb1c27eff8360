#include "core/maintain.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "core/parallel.h"
#include "core/signature_distance.h"
#include "io/error.h"

namespace swarm_kv {
namespace {

constexpr int64_t kGrainEntries = 8;

class OnlineDistance {
 public:
  explicit OnlineDistance(const JoinOptions& options)
      : printed_(options.distance == "global"),
        steps_(static_cast<double>(options.steps)),
        distance_(printed_ ? "jaccard" : options.distance, options.tau, nullptr, 0, 0) {}

  double operator()(int64_t common, int64_t f_entry, int64_t f_medoid) const {
    if (printed_) return 1.0 - static_cast<double>(common) / steps_;
    return distance_(common, f_entry, f_medoid);
  }

 private:
  bool printed_;
  double steps_;
  SignatureDistance distance_;
};

void check(const JoinOptions& options) {
  const auto fail = [](const std::string& message) {
    throw Error(ErrorKind::kArgument, "join_clusters: " + message);
  };
  if (!(options.tau >= 0 && options.tau <= 1)) {
    fail("tau must be in [0, 1], got " + std::to_string(options.tau));
  }
  if (options.steps < 1) fail("steps must be at least 1, got " + std::to_string(options.steps));
  if (options.max_replicas < 1) {
    fail("max_replicas must be at least 1, got " + std::to_string(options.max_replicas));
  }
}

int64_t popcount(const int64_t* row, int64_t words) {
  int64_t sum = 0;
  for (int64_t w = 0; w < words; ++w) sum += std::popcount(static_cast<uint64_t>(row[w]));
  return sum;
}

int64_t in_common(const int64_t* one, const int64_t* other, int64_t words) {
  int64_t sum = 0;
  for (int64_t w = 0; w < words; ++w) {
    sum += std::popcount(static_cast<uint64_t>(one[w] & other[w]));
  }
  return sum;
}

}  // namespace

Homes join_clusters(const int64_t* bits, int64_t num_entries, const int64_t* medoid_bits,
                    int64_t num_clusters, int64_t words, const JoinOptions& options) {
  check(options);
  const OnlineDistance distance(options);
  std::vector<int64_t> active(num_clusters);
  for (int64_t c = 0; c < num_clusters; ++c) active[c] = popcount(medoid_bits + c * words, words);

  std::vector<std::vector<int64_t>> joined(num_entries);
  parallel_for(0, num_entries, kGrainEntries, [&](int64_t first, int64_t last) {
    std::vector<std::pair<double, int64_t>> near;
    for (int64_t i = first; i < last; ++i) {
      const int64_t* row = bits + i * words;
      const int64_t own = popcount(row, words);
      near.clear();
      for (int64_t c = 0; c < num_clusters; ++c) {
        const int64_t common = in_common(row, medoid_bits + c * words, words);
        if (common > 0) near.emplace_back(distance(common, own, active[c]), c);
      }
      const auto kept = std::min<int64_t>(options.max_replicas, std::ssize(near));
      std::partial_sort(near.begin(), near.begin() + kept, near.end());
      for (int64_t n = 0; n < kept; ++n) {
        if (n == 0 || near[n].first < options.tau) joined[i].push_back(near[n].second);
      }
    }
  });

  Homes result;
  for (const auto& own : joined) {
    result.homes.insert(result.homes.end(), own.begin(), own.end());
    result.rows.push_back(std::ssize(result.homes));
  }
  return result;
}

}  // namespace swarm_kv
