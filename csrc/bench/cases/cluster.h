#pragma once

#include <cstdint>
#include <vector>

#include "bench/cases/data.h"
#include "core/bisection.h"
#include "core/hypergraph.h"
#include "core/signature.h"

namespace swarm_kv::bench {

// Which entries each of 256 queries of 8 heads over 2 KV heads activates.
class Signatures {
 public:
  static constexpr int64_t kQueries = 256, kHeads = 8, kKvHeads = 2, kDim = 64;

  explicit Signatures(int64_t entries)
      : entries_(entries),
        queries_(random_.numbers<fp16>(kHeads * kQueries * kDim)),
        keys_(random_.numbers<fp16>(kKvHeads * entries * kDim)),
        bits_(entries * kQueries / 64) {
    for (int64_t i = 0; i < kQueries; ++i) positions_.push_back(entries + i);
  }

  void run() {
    const HeadRows q{queries_.data(), kHeads, kQueries, kDim, kQueries * kDim, kDim};
    const HeadRows k{keys_.data(), kKvHeads, entries_, kDim, entries_ * kDim, kDim};
    activation_signatures(q, k, positions_.data(), nullptr, {.scale = 0.125}, bits_.data());
  }
  int64_t items() const { return entries_; }
  int64_t bytes() const { return 0; }

 private:
  Random random_{14};
  int64_t entries_;
  std::vector<fp16> queries_, keys_;
  std::vector<int64_t> positions_, bits_;
};

// The default clusterer, of whose time nearly all is bisection, on signatures of 256 queries that
// activate a tenth each, in stretches of an order that is not theirs.
class Hypergraph {
 public:
  static constexpr int64_t kWords = 4;

  explicit Hypergraph(int64_t entries) : bits_(entries * kWords) {
    const std::vector<int32_t> order = random_.permutation(entries);
    for (int64_t query = 0; query < 64 * kWords; ++query) {
      for (const int64_t n : stretches(entries, 64, random_)) {
        bits_[order[n] * kWords + query / 64] |= static_cast<int64_t>(uint64_t{1} << query % 64);
      }
    }
  }

  void run() { clusters_ = hypergraph_clusters(bits_.data(), items(), kWords, {}); }
  int64_t items() const { return static_cast<int64_t>(bits_.size()) / kWords; }
  int64_t bytes() const { return 0; }

 private:
  Random random_{15};
  std::vector<int64_t> bits_;
  Clusters clusters_;
};

}  // namespace swarm_kv::bench
