#include "ops/cpu/scoring.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "ops/cpu/vector.h"

namespace swarm_kv::cpu {
namespace {

// Items scored at a time: a few rows of scores stay in the first-level cache.
constexpr int64_t kBlock = 512;

// Rows of one KV head that are scored together, at most kMaxWidth.
struct RowGroup {
  int64_t kv;
  int64_t first;  // row within the KV head
  int64_t count;
};

constexpr int64_t kMaxWidth = 8;

std::vector<RowGroup> group_rows(const ScoreQueries& queries) {
  std::vector<RowGroup> groups;
  for (int64_t kv = 0; kv < queries.kv_heads; ++kv) {
    for (int64_t first = 0; first < queries.rows; first += kMaxWidth) {
      groups.push_back({kv, first, std::min(kMaxWidth, queries.rows - first)});
    }
  }
  return groups;
}

// Lanes of a lookup table for `count` rows.
int64_t table_width(int64_t count) { return count == 1 ? 1 : count <= 4 ? 4 : 8; }

// table[k][w] (+)= scale * (row w . codeword k) over kDims neighbouring features; lanes beyond
// count are 0.
template <int kWidth, int kDims>
SWARM_KV_INLINE void add_features(const float* queries, int64_t count, int64_t stride,
                                  const float* codebook, int64_t codewords, int64_t part_dim,
                                  float scale, bool first, float* table) {
  typedef float Lanes __attribute__((vector_size(kWidth * sizeof(float))));
  Lanes rows[kDims] = {};
  for (int d = 0; d < kDims; ++d) {
    for (int64_t w = 0; w < count; ++w) rows[d][w] = scale * queries[w * stride + d];
  }
  for (int64_t k = 0; k < codewords; ++k) {
    Lanes sum = {};
    if (!first) std::memcpy(&sum, table + k * kWidth, sizeof(sum));
    for (int d = 0; d < kDims; ++d) sum += rows[d] * codebook[k * part_dim + d];
    std::memcpy(table + k * kWidth, &sum, sizeof(sum));
  }
}

template <int kWidth>
SWARM_KV_INLINE void fill_table(const float* queries, int64_t count, int64_t stride,
                                int64_t part_dim, const float* codebook, int64_t codewords,
                                float scale, float* table) {
  int64_t d = 0;
  for (; d + 8 <= part_dim; d += 8) {
    add_features<kWidth, 8>(queries + d, count, stride, codebook + d, codewords, part_dim, scale,
                            d == 0, table);
  }
  for (; d < part_dim; ++d) {
    add_features<kWidth, 1>(queries + d, count, stride, codebook + d, codewords, part_dim, scale,
                            d == 0, table);
  }
}

SWARM_KV_CLONES void fill_tables(const float* queries, int64_t count, int64_t stride, int64_t parts,
                                 int64_t part_dim, const float* codebooks, int64_t codewords,
                                 float scale, float* tables) {
  const int64_t width = table_width(count);
  for (int64_t m = 0; m < parts; ++m) {
    const float* q = queries + m * part_dim;
    const float* codebook = codebooks + m * codewords * part_dim;
    float* table = tables + m * codewords * width;
    if (width == 1) {
      fill_table<1>(q, count, stride, part_dim, codebook, codewords, scale, table);
    } else if (width == 4) {
      fill_table<4>(q, count, stride, part_dim, codebook, codewords, scale, table);
    } else {
      fill_table<8>(q, count, stride, part_dim, codebook, codewords, scale, table);
    }
  }
}

// sums[n] (+)= table[code] of kParts neighbouring parts. One code fetches the table values of all
// rows at once, which is what makes wide groups cheap.
template <int kWidth, int kParts>
SWARM_KV_INLINE void add_parts(const float* tables, int64_t codewords, const uint8_t* codes,
                               int64_t code_stride, int64_t count, bool first, float* sums) {
  typedef float Lanes __attribute__((vector_size(kWidth * sizeof(float))));
  for (int64_t n = 0; n < count; ++n) {
    Lanes sum = {};
    if (!first) std::memcpy(&sum, sums + n * kWidth, sizeof(sum));
    for (int m = 0; m < kParts; ++m) {
      const int64_t code = codes[m * code_stride + n];
      Lanes value;
      std::memcpy(&value, tables + (m * codewords + code) * kWidth, sizeof(value));
      sum += value;
    }
    std::memcpy(sums + n * kWidth, &sum, sizeof(sum));
  }
}

// scores[w * kBlock + n] = sum over parts of table[m][codes[m][n]][w]
template <int kWidth>
SWARM_KV_INLINE void look_up(const float* tables, int64_t parts, int64_t codewords,
                             const uint8_t* codes, int64_t code_stride, int64_t count,
                             float* scores) {
  float sums[kBlock * kWidth];
  int64_t m = 0;
  for (; m + 4 <= parts; m += 4) {
    add_parts<kWidth, 4>(tables + m * codewords * kWidth, codewords, codes + m * code_stride,
                         code_stride, count, m == 0, sums);
  }
  for (; m < parts; ++m) {
    add_parts<kWidth, 1>(tables + m * codewords * kWidth, codewords, codes + m * code_stride,
                         code_stride, count, m == 0, sums);
  }
  for (int w = 0; w < kWidth; ++w) {
    for (int64_t n = 0; n < count; ++n) scores[w * kBlock + n] = sums[n * kWidth + w];
  }
}

SWARM_KV_CLONES void look_up_block(const float* tables, int64_t width, int64_t parts,
                                   int64_t codewords, const uint8_t* codes, int64_t code_stride,
                                   int64_t count, float* scores) {
  if (width == 1) {
    look_up<1>(tables, parts, codewords, codes, code_stride, count, scores);
  } else if (width == 4) {
    look_up<4>(tables, parts, codewords, codes, code_stride, count, scores);
  } else {
    look_up<8>(tables, parts, codewords, codes, code_stride, count, scores);
  }
}

SWARM_KV_CLONES void dot_block(const float* queries, int64_t rows, int64_t dim, const float* keys,
                               int64_t count, float scale, float* scores) {
  for (int64_t n = 0; n < count; ++n) {
    dot_all(queries, rows, dim, keys + n * dim, dim, scale, scores + n, kBlock);
  }
}

// One block of one row: weights become exp(score - max).
struct BlockState {
  float max;
  float sum;
};

SWARM_KV_CLONES BlockState exponentiate(const float* scores, int64_t count, float* weights) {
  const float max = max_of(scores, count, -std::numeric_limits<float>::infinity());
  const float shift = max == -std::numeric_limits<float>::infinity() ? 0.0f : max;
  for (int64_t n = 0; n < count; ++n) weights[n] = fast_expf(scores[n] - shift);
  return {max, sum_of(weights, count)};
}

// out[n] = sum over rows of factor[row] * weights[row][n]
SWARM_KV_CLONES void combine(const float* weights, int64_t row_stride, const float* factors,
                             int64_t factor_stride, int64_t rows, int64_t count, float* out) {
  std::fill_n(out, count, 0.0f);
  for (int64_t r = 0; r < rows; ++r) {
    const float factor = factors[r * factor_stride];
    const float* source = weights + r * row_stride;
    for (int64_t n = 0; n < count; ++n) out[n] += factor * source[n];
  }
}

// The mean over all rows of the softmax over items. score(group, first, count, scores) writes
// scores[w * kBlock + n]. Each block is exponentiated relative to its own maximum while it is in
// the cache; the row's maximum and sum then only scale it.
template <typename Score>
void mean_softmax(const ScoreQueries& queries, int64_t items, float* out, const Score& score) {
  const std::vector<RowGroup> groups = group_rows(queries);
  const int64_t rows = queries.kv_heads * queries.rows;
  const int64_t blocks = (items + kBlock - 1) / kBlock;
  const int64_t num_groups = static_cast<int64_t>(groups.size());
  const auto weights = std::make_unique_for_overwrite<float[]>(rows * items);
  std::vector<BlockState> states(rows * blocks);
  std::vector<float> factors(rows * blocks);

  torch::stable::parallel_for(0, blocks * num_groups, 4, [&](int64_t begin, int64_t end) {
    float scores[kMaxWidth * kBlock];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t block = task / num_groups;
      const int64_t g = task % num_groups;
      const int64_t first = block * kBlock;
      const int64_t count = std::min(kBlock, items - first);
      score(g, groups[g], first, count, scores);
      for (int64_t w = 0; w < groups[g].count; ++w) {
        const int64_t row = groups[g].kv * queries.rows + groups[g].first + w;
        states[row * blocks + block] =
            exponentiate(scores + w * kBlock, count, weights.get() + row * items + first);
      }
    }
  });

  for (int64_t row = 0; row < rows; ++row) {
    const BlockState* state = states.data() + row * blocks;
    float max = state[0].max;
    for (int64_t b = 1; b < blocks; ++b) max = std::max(max, state[b].max);
    double sum = 0;
    for (int64_t b = 0; b < blocks; ++b) {
      factors[row * blocks + b] = std::exp(state[b].max - max);
      sum += static_cast<double>(factors[row * blocks + b]) * state[b].sum;
    }
    const float inverse = static_cast<float>(1.0 / (sum * static_cast<double>(rows)));
    for (int64_t b = 0; b < blocks; ++b) factors[row * blocks + b] *= inverse;
  }

  torch::stable::parallel_for(0, blocks, 8, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlock;
      combine(weights.get() + first, items, factors.data() + block, blocks, rows,
              std::min(kBlock, items - first), out + first);
    }
  });
}

}  // namespace

void score_codes(const ScoreQueries& queries, const float* codebooks, int64_t parts,
                 int64_t codewords, const uint8_t* codes, int64_t items, float scale, float* out) {
  const std::vector<RowGroup> groups = group_rows(queries);
  const int64_t part_dim = queries.dim / parts;
  const int64_t table_size = parts * codewords * kMaxWidth;
  const auto tables = std::make_unique_for_overwrite<float[]>(groups.size() * table_size);
  torch::stable::parallel_for(
      0, static_cast<int64_t>(groups.size()), 1, [&](int64_t begin, int64_t end) {
        for (int64_t g = begin; g < end; ++g) {
          const RowGroup& group = groups[g];
          fill_tables(queries.data + (group.kv * queries.rows + group.first) * queries.dim,
                      group.count, queries.dim, parts, part_dim,
                      codebooks + group.kv * codewords * queries.dim, codewords, scale,
                      tables.get() + g * table_size);
        }
      });
  mean_softmax(queries, items, out,
               [&](int64_t g, const RowGroup& group, int64_t first, int64_t count, float* scores) {
                 look_up_block(tables.get() + g * table_size, table_width(group.count), parts,
                               codewords, codes + group.kv * parts * items + first, items, count,
                               scores);
               });
}

void score_keys(const ScoreQueries& queries, const float* keys, int64_t items, float scale,
                float* out) {
  mean_softmax(queries, items, out,
               [&](int64_t, const RowGroup& group, int64_t first, int64_t count, float* scores) {
                 dot_block(queries.data + (group.kv * queries.rows + group.first) * queries.dim,
                           group.count, queries.dim,
                           keys + (group.kv * items + first) * queries.dim, count, scale, scores);
               });
}

SWARM_KV_CLONES uint8_t max_code(const uint8_t* codes, int64_t count) {
  uint8_t max = 0;
  for (int64_t i = 0; i < count; ++i) max = codes[i] > max ? codes[i] : max;
  return max;
}

}  // namespace swarm_kv::cpu
