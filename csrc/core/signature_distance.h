#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace swarm_kv {

// The distance of two signatures with f_i and f_j bits set (both > 0), f_ij of them in common, and
// what lies within the radius tau. It falls as f_ij grows.
//
// "jaccard"      1 - f_ij / (f_i + f_j - f_ij): both have to be active together most of the time.
// "conditional"  1 - f_ij / min(f_i, f_j): one minus the larger of P(i | j) and P(j | i), which is
//                symmetric, and 0 for an entry that is active only when a more popular one is too:
//                reading it along is never in vain when it is wanted.
// "global"       1 - f_ij / all_pairs: Eq. 2-3 of arXiv 2603.17803 as printed, all_pairs the sum of
//                f_ij over all i < j. Next to 1 for every pair of a large input, so that only a tau
//                next to 1 means anything.
class SignatureDistance {
 public:
  // Throws Error(kArgument) that lists the known names. Only "global" looks at `bits`
  // [num_entries, words].
  SignatureDistance(const std::string& name, double tau, const uint64_t* bits, int64_t num_entries,
                    int64_t words);

  double tau() const { return tau_; }

  double operator()(int64_t f_ij, int64_t f_i, int64_t f_j) const {
    return 1.0 - static_cast<double>(f_ij) / denominator(f_ij, f_i, f_j);
  }

  // The sum over `count` members j of the distance to them, added up in their order, from
  // common[j] = f_ij and popcounts[j] = f_j. `distances` [count] is scratch.
  double sum(const int32_t* common, int32_t f_i, const int32_t* popcounts, int64_t count,
             double* distances) const;

  // [f_j] for f_j <= max_popcount: the least f_ij that is within tau of a signature of f_i bits, or
  // more than f_ij can be. Just what comparing distances gives, without a division per pair. Never
  // falls as f_j grows from 1; nothing is within tau of f_j = 0.
  void thresholds(int32_t f_i, int32_t max_popcount, std::vector<int32_t>& least) const;

 private:
  enum class Kind { kJaccard, kConditional, kGlobal };

  double denominator(int64_t f_ij, int64_t f_i, int64_t f_j) const {
    switch (kind_) {
      case Kind::kJaccard:
        return static_cast<double>(f_i + f_j - f_ij);
      case Kind::kConditional:
        return static_cast<double>(std::min(f_i, f_j));
      default:
        return all_pairs_;
    }
  }

  Kind kind_ = Kind::kJaccard;
  double tau_;
  double all_pairs_ = 1.0;
};

}  // namespace swarm_kv
