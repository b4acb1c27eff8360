#include "ops/cpu/scoring.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "core/flush_denormals.h"
#include "core/nibble_scan.h"
#include "ops/cpu/threads.h"
#include "ops/cpu/vector.h"

namespace swarm_kv::cpu {
namespace {

// Items scored at a time: a few rows of scores stay in the first-level cache.
constexpr int64_t kBlock = 512;
// Fewer are not worth a second thread: where the cores are busy, meeting it takes far longer.
constexpr int64_t kFewBlocks = 32;

// Rows of one KV head that are scored together, at most kMaxWidth.
struct RowGroup {
  int64_t kv;
  int64_t first;  // row within the KV head
  int64_t count;
};

constexpr int64_t kMaxWidth = 8;

// Keys widened to float at a time: they and the queries stay in the first-level cache.
constexpr int64_t kWidened = 32;

// The groups of each KV head in turn, the same number for each.
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
  for (; d + 2 <= part_dim; d += 2) {
    add_features<kWidth, 2>(queries + d, count, stride, codebook + d, codewords, part_dim, scale,
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

// Tables [parts][16] of one row out of those of `width` rows, rounded for scan_nibbles. What is
// taken off each part's values is the same for all items, so a softmax never sees it. Returns the
// step.
float round_tables(const float* tables, int64_t width, int64_t parts, uint8_t* rounded) {
  const auto at = [&](int64_t m, int64_t k) { return tables[(m * 16 + k) * width]; };
  std::vector<float> lowest(parts);
  float range = 0;
  for (int64_t m = 0; m < parts; ++m) {
    float highest = lowest[m] = at(m, 0);
    for (int64_t k = 1; k < 16; ++k) {
      lowest[m] = std::min(lowest[m], at(m, k));
      highest = std::max(highest, at(m, k));
    }
    range = std::max(range, highest - lowest[m]);
  }
  const float per_step = range > 0 ? kScanTableMax / range : 0;
  for (int64_t m = 0; m < parts; ++m) {
    for (int64_t k = 0; k < 16; ++k) {
      const float steps = std::min((at(m, k) - lowest[m]) * per_step + 0.5f, kScanTableMax + 0.5f);
      rounded[m * 16 + k] = static_cast<uint8_t>(steps);
    }
  }
  return range / kScanTableMax;
}

// scores[r * kBlock + n]
template <int kBytes>
SWARM_KV_INLINE void dot_block_by(const float* queries, int64_t rows, int64_t dim,
                                  const float* keys, int64_t count, float scale, float* scores) {
  const float* key[kBlock];
  for (int64_t n = 0; n < count; ++n) key[n] = keys + n * dim;
  dot_all<kBytes>(queries, rows, dim, key, count, dim, scale, scores, kBlock);
}

SWARM_KV_WIDTHS(void, dot_block,
                (const float* queries, int64_t rows, int64_t dim, const float* keys, int64_t count,
                 float scale, float* scores),
                (queries, rows, dim, keys, count, scale, scores))

// One block of one row: weights become exp(score - max).
struct BlockState {
  float max;
  float sum;
};

template <int kBytes>
SWARM_KV_INLINE BlockState exponentiate_by(const float* scores, int64_t count, float* weights) {
  const float max = max_of<kBytes>(scores, count, -std::numeric_limits<float>::infinity());
  const float shift = max == -std::numeric_limits<float>::infinity() ? 0.0f : max;
  exp_below<kBytes>(scores, count, shift, weights);
  return {max, sum_of<kBytes>(weights, count)};
}

SWARM_KV_WIDTHS(BlockState, exponentiate, (const float* scores, int64_t count, float* weights),
                (scores, count, weights))

template <int kBytes>
SWARM_KV_INLINE void load_weights(const float* source, typename Vec<float, kBytes>::type& vector) {
  load(source, vector);
}

template <int kBytes>
SWARM_KV_INLINE void load_weights(const bf16* source, typename Vec<float, kBytes>::type& vector) {
  typedef uint16_t Shorts __attribute__((vector_size(kBytes / 2)));
  using Bits = typename Vec<float, kBytes>::bits;
  Shorts half;
  std::memcpy(&half, source, sizeof(half));
  const Bits bits = __builtin_convertvector(half, Bits) << 16;
  std::memcpy(&vector, &bits, sizeof(vector));
}

// The same for scores of `step` times an integer, which are rough by themselves: so are the
// weights, within 1 %, in 16 bits. The bits of a bf16 are nearly its logarithm in 128ths of an
// octave; what the mantissa is off by is nearly a parabola.
template <int kBytes>
SWARM_KV_INLINE BlockState exponentiate_sums_by(const uint16_t* sums, int64_t count, float step,
                                                bf16* weights) {
  constexpr uint16_t kOne = 127 << 7;  // the bits of 1
  uint16_t max = 0;
  for (int64_t n = 0; n < count; ++n) max = sums[n] > max ? sums[n] : max;
  const float per_step = std::min(step * 1.44269504f * 128, 8192.0f);
  const uint16_t whole = static_cast<uint16_t>(per_step);
  const uint16_t fraction = static_cast<uint16_t>((per_step - whole) * 65536);
  const uint16_t deepest =
      static_cast<uint16_t>(std::min<float>(kOne / std::max(per_step, 0.25f), 65535.0f));
  for (int64_t n = 0; n < count; ++n) {
    const uint16_t below = max - sums[n];
    const uint16_t depth = below < deepest ? below : deepest;
    const uint16_t more = (uint32_t{depth} * fraction) >> 16;
    const uint16_t bits = kOne - static_cast<uint16_t>(depth * whole) - more;
    const uint16_t mantissa = bits & 127;
    const uint16_t parabola = mantissa * (128 - mantissa) + 186;
    const uint16_t excess = (uint32_t{parabola} * 176) >> 16;
    weights[n].bits = bits - excess;
  }
  using V = typename Vec<float, kBytes>::type;
  constexpr int64_t kLanes = Vec<float, kBytes>::kLanes;
  V total = {}, some;
  int64_t n = 0;
  for (; n + kLanes <= count; n += kLanes) {
    load_weights<kBytes>(weights + n, some);
    total += some;
  }
  float sum = sum_lanes<kBytes, float>(total);
  for (; n < count; ++n) sum += weights[n];
  return {step * static_cast<float>(max), sum};
}

SWARM_KV_WIDTHS(BlockState, exponentiate_sums,
                (const uint16_t* sums, int64_t count, float step, bf16* weights),
                (sums, count, step, weights))

template <int kBytes, typename W>
SWARM_KV_INLINE void combine_by(const W* weights, int64_t row_stride, const float* factors,
                                int64_t factor_stride, int64_t rows, int64_t count, bool first,
                                float* out) {
  using V = typename Vec<float, kBytes>::type;
  constexpr int64_t kLanes = Vec<float, kBytes>::kLanes;
  int64_t n = 0;
  for (; n + kLanes <= count; n += kLanes) {
    V sum = {};
    if (!first) load(out + n, sum);
    for (int64_t r = 0; r < rows; ++r) {
      V weight;
      load_weights<kBytes>(weights + r * row_stride + n, weight);
      sum += factors[r * factor_stride] * weight;
    }
    store(sum, out + n);
  }
  for (; n < count; ++n) {
    float sum = first ? 0.0f : out[n];
    for (int64_t r = 0; r < rows; ++r) {
      sum += factors[r * factor_stride] * static_cast<float>(weights[r * row_stride + n]);
    }
    out[n] = sum;
  }
}

// out[n] (+)= sum over rows of factor[row] * weights[row][n]
#define SWARM_KV_COMBINE(W)                                                                     \
  SWARM_KV_WIDTHS(void, combine,                                                                \
                  (const W* weights, int64_t row_stride, const float* factors,                  \
                   int64_t factor_stride, int64_t rows, int64_t count, bool first, float* out), \
                  (weights, row_stride, factors, factor_stride, rows, count, first, out))
SWARM_KV_COMBINE(float)
SWARM_KV_COMBINE(bf16)
#undef SWARM_KV_COMBINE

// The weights of one group of rows over one block of items, and where to put them.
template <typename W>
struct BlockWeights {
  int64_t group;  // number of the group
  int64_t first;  // item
  int64_t count;
  W* weights;      // of the group's first row
  int64_t stride;  // from one row's weights to the next one's
  BlockState* states;
  int64_t state_stride;
};

// From scores[w * kBlock + n] of the group's rows.
void weigh(const float* scores, int64_t rows, const BlockWeights<float>& block) {
  for (int64_t w = 0; w < rows; ++w) {
    block.states[w * block.state_stride] =
        exponentiate(scores + w * kBlock, block.count, block.weights + w * block.stride);
  }
}

// Weights that a thread keeps room for. Up to there a call as large as the last one asks for no
// memory.
constexpr int64_t kKept = 1 << 19;

template <typename W>
struct Scratch {
  std::unique_ptr<W[]> weights;
  int64_t room = 0;
  std::vector<BlockState> states;
  std::vector<float> factors;

  void reserve(int64_t weight_count, int64_t state_count) {
    if (room < weight_count) {
      weights = std::make_unique_for_overwrite<W[]>(weight_count);
      room = weight_count;
    }
    states.resize(state_count);
    factors.resize(state_count);
  }
};

// The mean over all rows of the softmax over items. fill(group, block) writes the block's weights
// and states. Each block is exponentiated relative to its own maximum while it is in
// the cache; the row's maximum and sum then only scale it. One KV head after the other, so that the
// weights held at a time are few.
template <typename W, typename Fill>
void mean_softmax(const ScoreQueries& queries, int64_t items, float* out, const Fill& fill) {
  const std::vector<RowGroup> groups = group_rows(queries);
  const int64_t rows = queries.rows;
  const int64_t blocks = (items + kBlock - 1) / kBlock;
  const int64_t size = (items + blocks - 1) / blocks;  // equal: a short one fills no vector
  const int64_t groups_per_head = static_cast<int64_t>(groups.size()) / queries.kv_heads;
  static thread_local Scratch<W> kept;
  Scratch<W> own;
  Scratch<W>& scratch = rows * items <= kKept ? kept : own;
  scratch.reserve(rows * items, rows * blocks);
  W* const weights = scratch.weights.get();
  std::vector<BlockState>& states = scratch.states;
  std::vector<float>& factors = scratch.factors;

  for (int64_t kv = 0; kv < queries.kv_heads; ++kv) {
    const int64_t first_group = kv * groups_per_head;
    parallel_for(0, blocks * groups_per_head, kFewBlocks, [&](int64_t begin, int64_t end) {
      const FlushDenormals flush;
      for (int64_t task = begin; task < end; ++task) {
        const int64_t block = task / groups_per_head;
        const int64_t g = first_group + task % groups_per_head;
        const int64_t first = block * size, row = groups[g].first;
        const BlockWeights<W> target{g,
                                     first,
                                     std::min(size, items - first),
                                     weights + row * items + first,
                                     items,
                                     states.data() + row * blocks + block,
                                     blocks};
        fill(groups[g], target);
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
      const double total_rows = static_cast<double>(queries.kv_heads * rows);
      const float inverse = static_cast<float>(1.0 / (sum * total_rows));
      for (int64_t b = 0; b < blocks; ++b) factors[row * blocks + b] *= inverse;
    }

    parallel_for(0, blocks, 2 * kFewBlocks, [&](int64_t begin, int64_t end) {
      const FlushDenormals flush;
      for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * size;
        combine(weights + first, items, factors.data() + block, blocks, rows,
                std::min(size, items - first), kv == 0, out + first);
      }
    });
  }
}

// out[r] += rows[r][d] * row for one d of the turn's rows, widened.
SWARM_KV_CLONES void add_turned(const float* rows, int64_t count, int64_t stride, const float* row,
                                int64_t dim, float* turned) {
  for (int64_t r = 0; r < count; ++r) {
    const float factor = rows[r * stride];
    for (int64_t d = 0; d < dim; ++d) turned[r * stride + d] += factor * row[d];
  }
}

}  // namespace

template <typename T>
void turn_queries(const ScoreQueries& queries, const T* turn, float* turned) {
  const int64_t dim = queries.dim;
  std::fill_n(turned, queries.kv_heads * queries.rows * dim, 0.0f);
  std::vector<float> wide(dim);
  for (int64_t kv = 0; kv < queries.kv_heads; ++kv) {
    const int64_t first = kv * queries.rows * dim;
    for (int64_t d = 0; d < dim; ++d) {
      to_float(turn + (kv * dim + d) * dim, wide.data(), dim);
      add_turned(queries.data + first + d, queries.rows, dim, wide.data(), dim, turned + first);
    }
  }
}

template void turn_queries<float>(const ScoreQueries&, const float*, float*);
template void turn_queries<fp16>(const ScoreQueries&, const fp16*, float*);
template void turn_queries<bf16>(const ScoreQueries&, const bf16*, float*);

namespace {

// The tables of all groups of rows: those of groups[g] begin at g * parts * codewords * kMaxWidth.
// Good until the thread's next call, and kept: malloc tidies up after a block of this size.
const float* make_tables(const ScoreQueries& queries, const std::vector<RowGroup>& groups,
                         const float* codebooks, int64_t parts, int64_t codewords, float scale) {
  const int64_t size = parts * codewords * kMaxWidth;
  static thread_local std::vector<float> kept;
  if (kept.size() < groups.size() * size) kept.resize(groups.size() * size);
  float* const tables = kept.data();
  parallel_for(0, static_cast<int64_t>(groups.size()), 4, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      const RowGroup& group = groups[g];
      fill_tables(queries.data + (group.kv * queries.rows + group.first) * queries.dim, group.count,
                  queries.dim, parts, queries.dim / parts,
                  codebooks + group.kv * codewords * queries.dim, codewords, scale,
                  tables + g * size);
    }
  });
  return tables;
}

}  // namespace

void score_codes(const ScoreQueries& queries, const float* codebooks, int64_t parts,
                 int64_t codewords, const uint8_t* codes, int64_t items, float scale, float* out) {
  const int64_t table_size = parts * codewords * kMaxWidth;
  const float* const tables =
      make_tables(queries, group_rows(queries), codebooks, parts, codewords, scale);
  mean_softmax<float>(
      queries, items, out, [&](const RowGroup& group, const BlockWeights<float>& block) {
        float scores[kMaxWidth * kBlock];
        look_up_block(tables + block.group * table_size, table_width(group.count), parts, codewords,
                      codes + group.kv * parts * items + block.first, items, block.count, scores);
        weigh(scores, group.count, block);
      });
}

void score_packed_codes(const ScoreQueries& queries, const float* codebooks, int64_t parts,
                        const uint8_t* codes, int64_t items, float scale, float* out) {
  const std::vector<RowGroup> groups = group_rows(queries);
  const int64_t table_size = parts * 16;  // of one row
  const float* const tables = make_tables(queries, groups, codebooks, parts, 16, scale);
  std::vector<uint8_t> rounded(groups.size() * kMaxWidth * table_size);
  std::vector<float> steps(groups.size() * kMaxWidth);
  for (size_t g = 0; g < groups.size(); ++g) {
    for (int64_t w = 0; w < groups[g].count; ++w) {
      const size_t row = g * kMaxWidth + w;
      steps[row] =
          round_tables(tables + g * kMaxWidth * table_size + w, table_width(groups[g].count), parts,
                       rounded.data() + row * table_size);
    }
  }
  mean_softmax<bf16>(
      queries, items, out, [&](const RowGroup& group, const BlockWeights<bf16>& block) {
        uint16_t sums[kMaxWidth * kBlock];
        const int64_t row = block.group * kMaxWidth;
        scan_nibbles(rounded.data() + row * table_size, group.count,
                     {codes + group.kv * (parts / 2) * items + block.first, items, parts},
                     block.count, sums, kBlock);
        for (int64_t w = 0; w < group.count; ++w) {
          block.states[w * block.state_stride] = exponentiate_sums(
              sums + w * kBlock, block.count, steps[row + w], block.weights + w * block.stride);
        }
      });
}

namespace {

// widen(kv, first, count, wide) writes keys as floats [count, dim].
template <typename Widen>
void score_widened(const ScoreQueries& queries, int64_t items, float scale, float* out,
                   const Widen& widen) {
  const int64_t dim = queries.dim;
  mean_softmax<float>(
      queries, items, out, [&](const RowGroup& group, const BlockWeights<float>& block) {
        float scores[kMaxWidth * kBlock];
        const float* rows = queries.data + (group.kv * queries.rows + group.first) * dim;
        std::vector<float> wide(kWidened * dim);
        for (int64_t n = 0; n < block.count; n += kWidened) {
          const int64_t some = std::min(kWidened, block.count - n);
          widen(group.kv, block.first + n, some, wide.data());
          dot_block(rows, group.count, dim, wide.data(), some, scale, scores + n);
        }
        weigh(scores, group.count, block);
      });
}

// Keys are read in bursts, between which the processor would not look ahead by itself.
template <typename T>
void prefetch(const T* source, int64_t count) {
#ifdef __GNUC__
  for (int64_t i = 0; i < count; i += 64 / static_cast<int64_t>(sizeof(T))) {
    __builtin_prefetch(source + i, 0, 2);
  }
#endif
}

SWARM_KV_CLONES void widen_nibbles(const uint8_t* keys, int64_t count, int64_t half, float* wide) {
  for (int64_t n = 0; n < count; ++n) {
    for (int64_t d = 0; d < half; ++d) {
      wide[2 * n * half + d] = static_cast<float>(keys[n * half + d] & 15);
      wide[(2 * n + 1) * half + d] = static_cast<float>(keys[n * half + d] >> 4);
    }
  }
}

}  // namespace

template <typename T>
void score_keys(const ScoreQueries& queries, const T* keys, int64_t items, float scale,
                float* out) {
  const int64_t dim = queries.dim;
  score_widened(queries, items, scale, out,
                [&](int64_t kv, int64_t first, int64_t count, float* wide) {
                  const T* source = keys + (kv * items + first) * dim;
                  to_float(source, wide, count * dim);
                  prefetch(source + count * dim, std::min(count, items - first - count) * dim);
                });
}

void score_coded_keys(const ScoreQueries& queries, const uint8_t* keys, const float* scales,
                      int64_t items, float scale, float* out) {
  const int64_t dim = queries.dim, half = dim / 2;
  // The scales go into the queries, once.
  std::vector<float> scaled(queries.kv_heads * queries.rows * dim);
  for (int64_t row = 0; row < queries.kv_heads * queries.rows; ++row) {
    const float* own = scales + row / queries.rows * dim;
    for (int64_t d = 0; d < dim; ++d) {
      scaled[row * dim + d] = queries.data[row * dim + d] * own[d];
    }
  }
  score_widened({scaled.data(), queries.kv_heads, queries.rows, dim}, items, scale, out,
                [&](int64_t kv, int64_t first, int64_t count, float* wide) {
                  widen_nibbles(keys + (kv * items + first) * half, count, half, wide);
                });
}

template void score_keys<float>(const ScoreQueries&, const float*, int64_t, float, float*);
template void score_keys<fp16>(const ScoreQueries&, const fp16*, int64_t, float, float*);
template void score_keys<bf16>(const ScoreQueries&, const bf16*, int64_t, float, float*);

SWARM_KV_CLONES uint8_t max_code(const uint8_t* codes, int64_t count) {
  uint8_t max = 0;
  for (int64_t i = 0; i < count; ++i) max = codes[i] > max ? codes[i] : max;
  return max;
}

}  // namespace swarm_kv::cpu
