#pragma once

#include <cstdint>

namespace swarm_kv {

// The inner loops of activation_signatures. A tile is kTile queries; everything of a tile is
// key-major with the queries as contiguous lanes, so that scores, softmax and selection all
// vectorise over queries.
constexpr int kTile = 16;  // one vector of 512 bits
// Keys that are scored at a time: their scores stay in the first-level cache.
constexpr int64_t kBlockKeys = 96;
constexpr int kKernelKeys = 12;
static_assert(kBlockKeys % kKernelKeys == 0);

struct QueryTile {
  int32_t seen[kTile];      // keys that the query sees: [0, seen)
  int32_t eligible[kTile];  // keys that it may activate: [sinks, eligible)
  int32_t max_seen;
  int32_t min_seen;
  int32_t max_eligible;
};

// scores [count rounded up to kKernelKeys][kTile] = keys [count][dim] . queries [dim][kTile].
void score_keys(const float* queries, const float* keys, int64_t count, int64_t dim, float* scores);

// log(sum of exp(score)) per query is maximum + log(sum); sum = 0 stands for no keys.
struct Normaliser {
  float maximum[kTile];
  float sum[kTile];

  Normaliser();
  float log_sum(int lane) const;
};

// Adds scores [count][kTile] of the keys from index `first` on; those that a query does not see
// become -infinity.
void add_scores(const QueryTile& tile, int64_t first, int64_t count, float* scores,
                Normaliser& normaliser);

// Adds what another range of keys gave.
void add_normaliser(const Normaliser& other, Normaliser& normaliser);

// result [count][kTile] += min(1, exp(score - lse)), or the larger of the two.
void add_probabilities(const float* scores, int64_t count, const float* lse, float* result);
void max_probabilities(const float* scores, int64_t count, const float* lse, float* result);

}  // namespace swarm_kv
