#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "bench/cases/data.h"
#include "ops/cpu/attention.h"

namespace swarm_kv::bench {

struct Heads {
  int64_t query, kv, dim;
};

// One query's attention over `entries` entries that lie anywhere in a pool of four times as many.
template <typename T>
class SparseAttention {
 public:
  SparseAttention(int64_t entries, Heads heads)
      : heads_(heads),
        query_(random_.numbers<float>(heads.query * heads.dim)),
        pool_(random_.numbers<T>(4 * entries * entry())),
        rows_{0, entries},
        out_(heads.query * heads.dim),
        lse_(heads.query) {
    const std::vector<int32_t> order = random_.permutation(4 * entries);
    for (int64_t i = 0; i < entries; ++i) slots_.push_back(order[i] * entry());
  }

  void run() {
    cpu::sparse_attention(
        cpu::SparseAttention<T, float>{.q = query_.data(),
                                       .pool = pool_.data(),
                                       .slots = slots_.data(),
                                       .row_offsets = rows_.data(),
                                       .rows = 1,
                                       .query_heads = heads_.query,
                                       .kv_heads = heads_.kv,
                                       .dim = heads_.dim,
                                       .scale = 1 / std::sqrt(static_cast<float>(heads_.dim)),
                                       .sinks = nullptr,
                                       .softcap = 0,
                                       .out = out_.data(),
                                       .lse = lse_.data()});
  }
  int64_t items() const { return static_cast<int64_t>(slots_.size()); }
  int64_t bytes() const { return items() * entry() * static_cast<int64_t>(sizeof(T)); }

 private:
  int64_t entry() const { return 2 * heads_.kv * heads_.dim; }  // numbers in it

  Random random_{9};
  Heads heads_;
  std::vector<float> query_;
  std::vector<T> pool_;
  std::vector<int64_t> slots_, rows_;
  std::vector<float> out_, lse_;
};

// Two partial attentions of `rows` heads become one.
class MergeAttention {
 public:
  static constexpr int64_t kDim = 128;

  explicit MergeAttention(int64_t rows)
      : out_a_(random_.numbers<float>(rows * kDim)),
        out_b_(random_.numbers<float>(rows * kDim)),
        lse_a_(random_.numbers<float>(rows)),
        lse_b_(random_.numbers<float>(rows)),
        out_(rows * kDim),
        lse_(rows) {}

  void run() {
    cpu::merge_attention(out_a_.data(), lse_a_.data(), out_b_.data(), lse_b_.data(), items(), kDim,
                         out_.data(), lse_.data());
  }
  int64_t items() const { return static_cast<int64_t>(lse_.size()); }
  int64_t bytes() const { return 3 * items() * (kDim + 1) * 4; }

 private:
  Random random_{10};
  std::vector<float> out_a_, out_b_, lse_a_, lse_b_, out_, lse_;
};

}  // namespace swarm_kv::bench
