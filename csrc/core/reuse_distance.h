#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace swarm_kv {

// How much of a segment was activated between two activations of the same entry, counted over all
// segments of a store: what a least-recently-used cache of each size would have missed.
struct ReuseDistances {
  static constexpr int kBuckets = 100;

  // Bucket b: activations whose entry would have been served by a cache of (b + 1) / kBuckets of
  // the segment's entries, and not by one of b / kBuckets.
  std::array<uint64_t, kBuckets> count{};
  uint64_t first = 0;  // activations of an entry that no step had activated before
  // How many activations there would be in all, had the sampled entries been activated as often as
  // the others: what misses are shares of.
  double expected = 0;
};

// Mattson's stack of one segment on a fixed sample of its entries, which a hash of their numbers
// chooses (spatial sampling: Waldspurger et al., "Efficient MRC construction with SHARDS", FAST
// 2015). Entries of one step are activated at once: none counts between another's activations. Work
// per step: a hash of each activated entry and a pass over the sample. Allocates only in the
// constructor.
class ReuseSample {
 public:
  // Entries that are sampled, on average, of a segment that has more.
  static constexpr int64_t kSample = 512;

  // Segments of different `seed` have samples that do not depend on each other.
  ReuseSample(int64_t entries, uint64_t seed);

  // Counts one decoding step's activated entries, each named once.
  void touch(std::span<const int32_t> entries, ReuseDistances& distances);

  uint64_t bytes() const;

 private:
  bool sampled(int32_t entry) const;

  uint64_t seed_ = 0;
  uint64_t threshold_ = 0;
  double share_ = 0;              // of the segment's entries that are sampled
  std::vector<int32_t> entries_;  // ascending
  std::vector<int32_t> stack_;    // numbers of samples, last activated first
  std::vector<int32_t> idle_;     // scratch
  std::vector<uint8_t> active_;   // per sample, of the current step
  std::vector<int32_t> touched_;  // samples of the current step
};

}  // namespace swarm_kv
