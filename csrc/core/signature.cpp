#include "core/signature.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>

#include "core/numeric.h"
#include "core/parallel.h"
#include "core/simd.h"
#include "io/error.h"

namespace swarm_kv {
namespace {

// A tile is kTile queries against all keys. Every buffer of a tile is key-major with the queries as
// the contiguous lanes, so that softmax, selection and bit packing all vectorise over queries, and
// keys need no transposing.
constexpr int kTile = 32;
constexpr int kWordBits = 64;
// Keys whose scores share one running maximum; their scores stay in the first-level cache.
constexpr int64_t kBlockKeys = 96;
constexpr int kKernelKeys = 6;  // times 2 vectors of lanes: what 16 registers hold
static_assert(kBlockKeys % kKernelKeys == 0);
static_assert(kWordBits % kTile == 0);

struct Tile {
  int32_t seen[kTile];      // keys that the query sees: [0, seen)
  int32_t eligible[kTile];  // keys that it may activate: [sinks, eligible)
  int32_t budget[kTile];    // how many of them
  int32_t max_seen;
  int32_t min_seen;
  int32_t max_eligible;
};

// scores [last - first rounded up to kKernelKeys][kTile] = keys [first, last) . queries
// [dim][kTile].
template <typename Vector>
SWARM_KV_INLINE void score_keys(const float* queries, const float* keys, int64_t first,
                                int64_t last, int64_t dim, float* scores) {
  constexpr int kLanes = sizeof(Vector) / sizeof(float);
  for (int64_t j = first; j < last; j += kKernelKeys) {
    const float* rows[kKernelKeys];
    for (int i = 0; i < kKernelKeys; ++i) rows[i] = keys + std::min(j + i, last - 1) * dim;
    for (int lane = 0; lane < kTile; lane += 2 * kLanes) {
      Vector sum[kKernelKeys][2] = {};
      for (int64_t d = 0; d < dim; ++d) {
        Vector left;
        Vector right;
        std::memcpy(&left, queries + d * kTile + lane, sizeof(Vector));
        std::memcpy(&right, queries + d * kTile + lane + kLanes, sizeof(Vector));
        for (int i = 0; i < kKernelKeys; ++i) {
          sum[i][0] += left * rows[i][d];
          sum[i][1] += right * rows[i][d];
        }
      }
      for (int i = 0; i < kKernelKeys; ++i) {
        float* out = scores + (j - first + i) * kTile + lane;
        std::memcpy(out, &sum[i][0], sizeof(Vector));
        std::memcpy(out + kLanes, &sum[i][1], sizeof(Vector));
      }
    }
  }
}

// Adds one head's softmax, times `weight`, to mean [keys][kTile]. queries [dim][kTile] are scaled
// already; scores [keys rounded up to kBlockKeys][kTile] and reference [blocks][kTile] are scratch.
// Returns false when a score is not finite.
template <typename Vector>
SWARM_KV_INLINE bool add_head_with(const Tile& tile, const float* queries, const float* keys,
                                   int64_t dim, float weight, float* scores, float* reference,
                                   float* mean) {
  const int64_t count = tile.max_seen;
  float maximum[kTile];
  float sum[kTile];
  for (int l = 0; l < kTile; ++l) {
    maximum[l] = -std::numeric_limits<float>::infinity();
    sum[l] = 0.0f;
  }
  for (int64_t block = 0; block * kBlockKeys < count; ++block) {
    const int64_t first = block * kBlockKeys;
    const int64_t last = std::min(first + kBlockKeys, count);
    score_keys<Vector>(queries, keys, first, last, dim, scores + first * kTile);
    if (last > tile.min_seen) {
      for (int64_t j = first; j < last; ++j) {
        float* row = scores + j * kTile;
        for (int l = 0; l < kTile; ++l) {
          row[l] = j < tile.seen[l] ? row[l] : -std::numeric_limits<float>::infinity();
        }
      }
    }
    float previous[kTile];
    for (int l = 0; l < kTile; ++l) previous[l] = maximum[l];
    for (int64_t j = first; j < last; ++j) {
      const float* row = scores + j * kTile;
      for (int l = 0; l < kTile; ++l) maximum[l] = maximum[l] < row[l] ? row[l] : maximum[l];
    }
    for (int l = 0; l < kTile; ++l) {
      sum[l] *= fast_expf(previous[l] - maximum[l]);
      reference[block * kTile + l] = maximum[l];
    }
    for (int64_t j = first; j < last; ++j) {
      float* row = scores + j * kTile;
      for (int l = 0; l < kTile; ++l) {
        row[l] = fast_expf(row[l] - maximum[l]);
        sum[l] += row[l];
      }
    }
  }

  bool finite = true;
  float factor[kTile];
  for (int l = 0; l < kTile; ++l) {
    finite &= sum[l] < std::numeric_limits<float>::infinity();
    factor[l] = weight / sum[l];
  }
  if (!finite) return false;
  for (int64_t block = 0; block * kBlockKeys < count; ++block) {
    float block_factor[kTile];
    for (int l = 0; l < kTile; ++l) {
      block_factor[l] = factor[l] * fast_expf(reference[block * kTile + l] - maximum[l]);
    }
    const int64_t last = std::min((block + 1) * kBlockKeys, count);
    for (int64_t j = block * kBlockKeys; j < last; ++j) {
      for (int l = 0; l < kTile; ++l) {
        mean[j * kTile + l] += scores[j * kTile + l] * block_factor[l];
      }
    }
  }
  return true;
}

typedef float Vector128 __attribute__((vector_size(16)));
typedef float Vector256 __attribute__((vector_size(32)));
typedef float Vector512 __attribute__((vector_size(64)));

// Versions of one function as SWARM_KV_CLONES makes them, but each with its own vector width.
#ifdef SWARM_KV_HAS_CLONES
__attribute__((target("arch=x86-64-v4"))) bool add_head(const Tile& tile, const float* queries,
                                                        const float* keys, int64_t dim,
                                                        float weight, float* scores,
                                                        float* reference, float* mean) {
  return add_head_with<Vector512>(tile, queries, keys, dim, weight, scores, reference, mean);
}

__attribute__((target("arch=x86-64-v3"))) bool add_head(const Tile& tile, const float* queries,
                                                        const float* keys, int64_t dim,
                                                        float weight, float* scores,
                                                        float* reference, float* mean) {
  return add_head_with<Vector256>(tile, queries, keys, dim, weight, scores, reference, mean);
}

__attribute__((target("default")))
#endif
bool add_head(const Tile& tile, const float* queries, const float* keys, int64_t dim, float weight,
              float* scores, float* reference, float* mean) {
  return add_head_with<Vector128>(tile, queries, keys, dim, weight, scores, reference, mean);
}

// Scores are not negative, so their bit patterns order as they do: a search over patterns finds the
// exact threshold. Afterwards each query takes the keys above threshold[l] and the first ties[l]
// keys equal to it.
SWARM_KV_CLONES void find_thresholds(const Tile& tile, int64_t sinks, float* mean,
                                     int32_t* threshold, int32_t* ties) {
  int32_t low[kTile];
  int32_t high[kTile];
  int32_t above[kTile];  // keys above `high`
  for (int l = 0; l < kTile; ++l) low[l] = high[l] = above[l] = 0;
  for (int64_t j = sinks; j < tile.max_eligible; ++j) {
    float* row = mean + j * kTile;
    for (int l = 0; l < kTile; ++l) {
      row[l] = j < tile.eligible[l] ? row[l] : 0.0f;
      const int32_t value = std::bit_cast<int32_t>(row[l]);
      high[l] = std::max(high[l], value);
    }
  }
  for (bool searching = true; searching;) {
    int32_t middle[kTile];
    int32_t count[kTile];
    for (int l = 0; l < kTile; ++l) {
      middle[l] = low[l] + (high[l] - low[l]) / 2;
      count[l] = 0;
    }
    for (int64_t j = sinks; j < tile.max_eligible; ++j) {
      const float* row = mean + j * kTile;
      for (int l = 0; l < kTile; ++l) {
        count[l] += std::bit_cast<int32_t>(row[l]) > middle[l] ? 1 : 0;
      }
    }
    searching = false;
    for (int l = 0; l < kTile; ++l) {
      if (count[l] > tile.budget[l]) {
        low[l] = middle[l] + 1;
      } else {
        high[l] = middle[l];
        above[l] = count[l];
        if (count[l] == tile.budget[l]) low[l] = middle[l];
      }
      searching |= low[l] < high[l];
    }
  }
  for (int l = 0; l < kTile; ++l) {
    threshold[l] = high[l];
    ties[l] = high[l] == 0 ? 0 : tile.budget[l] - above[l];
  }
}

// Sets bits [shift, shift + kTile) of one word per key; `column` is word t / 64 of row 0.
SWARM_KV_CLONES void set_bits(const Tile& tile, int64_t sinks, const float* mean,
                              const int32_t* threshold, const int32_t* ties, int shift,
                              int64_t words, int64_t* column) {
  int32_t left[kTile];
  int32_t bit[kTile];
  for (int l = 0; l < kTile; ++l) {
    left[l] = ties[l];
    bit[l] = static_cast<int32_t>(uint32_t{1} << l);
  }
  for (int64_t j = sinks; j < tile.max_eligible; ++j) {
    const float* row = mean + j * kTile;
    int32_t mask = 0;
    for (int l = 0; l < kTile; ++l) {
      const int32_t value = std::bit_cast<int32_t>(row[l]);
      const int32_t tie = (value == threshold[l] ? 1 : 0) & (left[l] > 0 ? 1 : 0);
      left[l] -= tie;
      mask |= (value > threshold[l] ? bit[l] : 0) | (-tie & bit[l]);
    }
    const uint64_t placed = static_cast<uint64_t>(static_cast<uint32_t>(mask)) << shift;
    if (placed != 0) column[j * words] |= static_cast<int64_t>(placed);
  }
}

[[noreturn]] void fail(const std::string& message) {
  throw Error(ErrorKind::kArgument, "activation_signatures: " + message);
}

void check(const float* q, int64_t heads_q, int64_t num_queries, const float* k, int64_t heads_kv,
           int64_t num_entries, int64_t dim, const int64_t* q_position,
           const SignatureOptions& options) {
  if (heads_kv < 1 || heads_q < heads_kv || heads_q % heads_kv != 0) {
    fail("heads_q must be a positive multiple of heads_kv, got " + std::to_string(heads_q) +
         " and " + std::to_string(heads_kv));
  }
  if (dim < 1) fail("dim must be at least 1, got " + std::to_string(dim));
  if (num_queries < 0) fail("num_queries must be at least 0, got " + std::to_string(num_queries));
  if (num_entries < 0 || num_entries > std::numeric_limits<int32_t>::max() - kBlockKeys) {
    fail("num_entries must be in [0, 2^31 - 97], got " + std::to_string(num_entries));
  }
  if (!(options.sparsity > 0.0 && options.sparsity <= 1.0)) {
    fail("sparsity must be in (0, 1], got " + std::to_string(options.sparsity));
  }
  if (options.window < 0) fail("window must be at least 0, got " + std::to_string(options.window));
  if (options.sinks < 0) fail("sinks must be at least 0, got " + std::to_string(options.sinks));
  if (options.context < 0) {
    fail("context must be at least 0 (0: num_entries), got " + std::to_string(options.context));
  }
  if (!std::isfinite(options.scale)) {
    fail("scale must be finite, got " + std::to_string(options.scale));
  }
  for (int64_t t = 0; t < num_queries; ++t) {
    if (q_position[t] < 0) {
      fail("q_position[" + std::to_string(t) + "] must be at least 0, got " +
           std::to_string(q_position[t]));
    }
  }
  if (!all_finite(q, heads_q * num_queries * dim)) fail("q holds NaN or infinity");
  if (!all_finite(k, heads_kv * num_entries * dim)) fail("k holds NaN or infinity");
}

// Query budget in entries; at most num_entries, which never limits the result.
int32_t activation_budget(const SignatureOptions& options, int64_t num_entries) {
  const int64_t context = options.context > 0 ? options.context : num_entries;
  const double rounded = std::round(options.sparsity * static_cast<double>(context));
  return static_cast<int32_t>(std::clamp(rounded, 1.0, static_cast<double>(num_entries)));
}

// Lanes past the last query repeat it with no budget, and so set no bits.
Tile make_tile(const int64_t* q_position, int64_t first, int64_t num_queries, int64_t num_entries,
               int64_t window, int32_t budget) {
  Tile tile;
  for (int l = 0; l < kTile; ++l) {
    const int64_t position = q_position[std::min(first + l, num_queries - 1)];
    tile.seen[l] = static_cast<int32_t>(std::min(position, num_entries - 1) + 1);
    const int64_t last = std::clamp<int64_t>(position - window, -1, num_entries - 1);
    tile.eligible[l] = first + l < num_queries ? static_cast<int32_t>(last + 1) : 0;
    tile.budget[l] = budget;
  }
  tile.max_seen = *std::max_element(tile.seen, tile.seen + kTile);
  tile.min_seen = *std::min_element(tile.seen, tile.seen + kTile);
  tile.max_eligible = *std::max_element(tile.eligible, tile.eligible + kTile);
  return tile;
}

}  // namespace

void activation_signatures(const float* q, int64_t heads_q, int64_t num_queries, const float* k,
                           int64_t heads_kv, int64_t num_entries, int64_t dim,
                           const int64_t* q_position, const SignatureOptions& options,
                           int64_t* bits) {
  check(q, heads_q, num_queries, k, heads_kv, num_entries, dim, q_position, options);
  const int64_t words = (num_queries + kWordBits - 1) / kWordBits;
  std::fill_n(bits, num_entries * words, 0);
  if (num_entries == 0 || num_queries == 0) return;

  const int32_t budget = activation_budget(options, num_entries);
  const int64_t group = heads_q / heads_kv;
  const int64_t blocks = (num_entries + kBlockKeys - 1) / kBlockKeys;
  const float scale = static_cast<float>(options.scale);
  const float weight = 1.0f / static_cast<float>(heads_q);

  // One word of queries at a time: no two threads write the same word.
  parallel_for(0, words, 1, [&](int64_t first_word, int64_t last_word) {
    const auto scores = std::make_unique_for_overwrite<float[]>(blocks * kBlockKeys * kTile);
    const auto mean = std::make_unique_for_overwrite<float[]>(num_entries * kTile);
    const auto reference = std::make_unique_for_overwrite<float[]>(blocks * kTile);
    const auto queries = std::make_unique_for_overwrite<float[]>(dim * kTile);
    for (int64_t first = first_word * kWordBits;
         first < std::min(last_word * kWordBits, num_queries); first += kTile) {
      const Tile tile =
          make_tile(q_position, first, num_queries, num_entries, options.window, budget);
      if (tile.max_eligible <= options.sinks) continue;
      std::fill_n(mean.get(), tile.max_seen * kTile, 0.0f);
      for (int64_t head = 0; head < heads_q; ++head) {
        for (int l = 0; l < kTile; ++l) {
          const int64_t t = std::min(first + l, num_queries - 1);
          const float* query = q + (head * num_queries + t) * dim;
          for (int64_t d = 0; d < dim; ++d) queries[d * kTile + l] = query[d] * scale;
        }
        const float* keys = k + head / group * num_entries * dim;
        if (!add_head(tile, queries.get(), keys, dim, weight, scores.get(), reference.get(),
                      mean.get())) {
          fail("scores overflow float32: q, k or scale " + std::to_string(options.scale) +
               " is too large");
        }
      }
      int32_t threshold[kTile];
      int32_t ties[kTile];
      find_thresholds(tile, options.sinks, mean.get(), threshold, ties);
      set_bits(tile, options.sinks, mean.get(), threshold, ties,
               static_cast<int>(first % kWordBits), words, bits + first / kWordBits);
    }
  });
}

}  // namespace swarm_kv
