#include "core/query_tile.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/simd.h"

namespace swarm_kv {
namespace {

// Twelve accumulators whatever the width: a few less than the registers there are.
template <int kBytes>
SWARM_KV_INLINE void score_tile_by(const float* queries, const float* keys, int64_t count,
                                   int64_t dim, float* scores) {
  typedef float Vector __attribute__((vector_size(kBytes)));
  constexpr int kLanes = kBytes / sizeof(float);
  constexpr int kVectors = kTile / kLanes;
  constexpr int kKeys = kKernelKeys / kVectors;
  for (int64_t first = 0; first < count; first += kKeys) {
    const float* rows[kKeys];
    for (int i = 0; i < kKeys; ++i) rows[i] = keys + std::min(first + i, count - 1) * dim;
    Vector sums[kKernelKeys];
    repeat<kKernelKeys>(SWARM_KV_BODY(i) { sums[i] = Vector{}; });
    for (int64_t d = 0; d < dim; ++d) {
      Vector lanes[kVectors];
      repeat<kVectors>(SWARM_KV_BODY(v) {
        std::memcpy(&lanes[v], queries + d * kTile + v * kLanes, sizeof(Vector));
      });
      repeat<kKeys>(SWARM_KV_BODY(i) {
        const float feature = rows[i][d];
        repeat<kVectors>(SWARM_KV_BODY(v) { sums[i * kVectors + v] += lanes[v] * feature; });
      });
    }
    float* out = scores + first * kTile;
    repeat<kKernelKeys>(
        SWARM_KV_BODY(i) { std::memcpy(out + i * kLanes, &sums[i], sizeof(Vector)); });
  }
}

SWARM_KV_WIDTHS(void, score_tile,
                (const float* queries, const float* keys, int64_t count, int64_t dim,
                 float* scores),
                (queries, keys, count, dim, scores))

SWARM_KV_INLINE float probability(float score, float lse) {
  const float x = score - lse;
  return fast_expf(x < 0.0f ? x : 0.0f);
}

}  // namespace

void score_keys(const float* queries, const float* keys, int64_t count, int64_t dim,
                float* scores) {
  score_tile(queries, keys, count, dim, scores);
}

// The lowest finite value, not -infinity: the difference of two maxima must not be NaN.
Normaliser::Normaliser() {
  std::fill_n(maximum, kTile, std::numeric_limits<float>::lowest());
  std::fill_n(sum, kTile, 0.0f);
}

float Normaliser::log_sum(int lane) const { return maximum[lane] + std::log(sum[lane]); }

SWARM_KV_CLONES void add_scores(const QueryTile& tile, int64_t first, int64_t count, float* scores,
                                Normaliser& normaliser) {
  if (first + count > tile.min_seen) {
    for (int64_t j = 0; j < count; ++j) {
      float* row = scores + j * kTile;
      SWARM_KV_LANES(l, kTile) {
        row[l] = first + j < tile.seen[l] ? row[l] : -std::numeric_limits<float>::infinity();
      }
    }
  }
  float maximum[kTile];
  float sum[kTile];
  SWARM_KV_LANES(l, kTile) {
    maximum[l] = normaliser.maximum[l];
    sum[l] = 0.0f;
  }
  for (int64_t j = 0; j < count; ++j) {
    const float* row = scores + j * kTile;
    SWARM_KV_LANES(l, kTile) maximum[l] = maximum[l] < row[l] ? row[l] : maximum[l];
  }
  for (int64_t j = 0; j < count; ++j) {
    const float* row = scores + j * kTile;
    SWARM_KV_LANES(l, kTile) sum[l] += fast_expf(row[l] - maximum[l]);
  }
  SWARM_KV_LANES(l, kTile) {
    normaliser.sum[l] = normaliser.sum[l] * fast_expf(normaliser.maximum[l] - maximum[l]) + sum[l];
    normaliser.maximum[l] = maximum[l];
  }
}

SWARM_KV_CLONES void add_normaliser(const Normaliser& other, Normaliser& normaliser) {
  SWARM_KV_LANES(l, kTile) {
    const float maximum = std::max(other.maximum[l], normaliser.maximum[l]);
    normaliser.sum[l] = normaliser.sum[l] * fast_expf(normaliser.maximum[l] - maximum) +
                        other.sum[l] * fast_expf(other.maximum[l] - maximum);
    normaliser.maximum[l] = maximum;
  }
}

SWARM_KV_CLONES void add_probabilities(const float* scores, int64_t count, const float* lse,
                                       float* result) {
  float shift[kTile];
  SWARM_KV_LANES(l, kTile) shift[l] = lse[l];
  for (int64_t j = 0; j < count; ++j) {
    float row[kTile];
    SWARM_KV_LANES(l, kTile) row[l] = probability(scores[j * kTile + l], shift[l]);
    SWARM_KV_LANES(l, kTile) result[j * kTile + l] += row[l];
  }
}

SWARM_KV_CLONES void max_probabilities(const float* scores, int64_t count, const float* lse,
                                       float* result) {
  float shift[kTile];
  SWARM_KV_LANES(l, kTile) shift[l] = lse[l];
  for (int64_t j = 0; j < count; ++j) {
    float row[kTile];
    SWARM_KV_LANES(l, kTile) row[l] = probability(scores[j * kTile + l], shift[l]);
    SWARM_KV_LANES(l, kTile) {
      result[j * kTile + l] = result[j * kTile + l] < row[l] ? row[l] : result[j * kTile + l];
    }
  }
}

}  // namespace swarm_kv
