#include "core/signature_distance.h"

#include <bit>
#include <numeric>

#include "core/simd.h"
#include "io/error.h"

namespace swarm_kv {
namespace {

// Sum of f_ij over all pairs of entries: a query with `a` active entries makes a (a - 1) / 2 pairs.
double count_pairs(const uint64_t* bits, int64_t num_entries, int64_t words) {
  std::vector<double> active(words * 64, 0.0);
  for (int64_t i = 0; i < num_entries; ++i) {
    for (int64_t w = 0; w < words; ++w) {
      for (uint64_t rest = bits[i * words + w]; rest != 0; rest &= rest - 1) {
        active[w * 64 + std::countr_zero(rest)] += 1.0;
      }
    }
  }
  double pairs = 0.0;
  for (const double a : active) pairs += a * (a - 1.0) / 2.0;
  return pairs;
}

SWARM_KV_CLONES void jaccard_distances(const int32_t* common, int32_t f_i, const int32_t* popcounts,
                                       int64_t count, double* __restrict distances) {
  for (int64_t j = 0; j < count; ++j) {
    distances[j] =
        1.0 - static_cast<double>(common[j]) / static_cast<double>(f_i + popcounts[j] - common[j]);
  }
}

}  // namespace

SignatureDistance::SignatureDistance(const std::string& name, double tau, const uint64_t* bits,
                                     int64_t num_entries, int64_t words)
    : tau_(tau) {
  if (name == "jaccard") {
    kind_ = Kind::kJaccard;
  } else if (name == "conditional") {
    kind_ = Kind::kConditional;
  } else if (name == "global") {
    kind_ = Kind::kGlobal;
    // Without any pair every f_ij is 0: any denominator gives a distance of 1.
    all_pairs_ = std::max(1.0, count_pairs(bits, num_entries, words));
  } else {
    throw Error(ErrorKind::kArgument,
                "unknown `distance` \"" + name + "\"; choose one of: jaccard, conditional, global");
  }
}

double SignatureDistance::sum(const int32_t* common, int32_t f_i, const int32_t* popcounts,
                              int64_t count, double* distances) const {
  if (kind_ == Kind::kJaccard) {
    jaccard_distances(common, f_i, popcounts, count, distances);
  } else {
    for (int64_t j = 0; j < count; ++j) distances[j] = (*this)(common[j], f_i, popcounts[j]);
  }
  return std::accumulate(distances, distances + count, 0.0);
}

void SignatureDistance::thresholds(int32_t f_i, int32_t max_popcount,
                                   std::vector<int32_t>& least) const {
  least.assign(max_popcount + 1, 1);
  int32_t common = 0;
  for (int32_t f_j = 1; f_j <= max_popcount; ++f_j) {
    while (common <= std::min(f_i, f_j) && (*this)(common, f_i, f_j) > tau_) ++common;
    least[f_j] = common;
  }
}

}  // namespace swarm_kv
