#include "core/nibble_scan.h"
#include "ops/cuda/device.h"
#include "ops/cuda/scoring.h"
#include "ops/cuda/workspace.h"

namespace swarm_kv::cuda {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarp = 32;

// Rows of one KV head that are scored together; those beyond the last one count as 0.
constexpr int kRows = 8;

// Scores are kept as logarithms to the base 2, whose exponential is one instruction.
constexpr float kLog2e = 1.44269504f;

// The softmax of a run of items of one row, relative to its own maximum.
struct State {
  float max;
  float sum;
};

// The weight of a score s of this row, its share of the mean: exp2((s - max) * factor) * inverse.
struct RowWeight {
  float max;
  float factor;
  float inverse;
};

template <typename Score, int kCount>
struct alignas(sizeof(Score) * kCount) Run {
  Score values[kCount];
};

// Scores [all rows][stride] and states [all rows][runs], one for each run of kWarp * kCount items
// that a warp scores.
template <typename Score, int kCount>
struct Scores {
  static constexpr int64_t kRun = kWarp * kCount;

  Score* values;
  State* states;
  int64_t runs;
  int64_t stride;

  Scores(Workspace& workspace, int64_t rows, int64_t items)
      : runs((items + kRun - 1) / kRun), stride(runs * kRun) {
    values = workspace.take<Score>(rows * stride);
    states = workspace.take<State>(rows * runs);
  }

  // Called by a whole warp with kCount neighbouring scores per lane from item `first` on; items
  // at `items` and beyond are padding.
  __device__ void put(int64_t row, int64_t first, int64_t items, float factor,
                      const Run<Score, kCount>& scores) const {
    float greatest = -INFINITY;
    for (int i = 0; i < kCount; ++i) {
      if (first + i < items) greatest = fmaxf(greatest, static_cast<float>(scores.values[i]));
    }
    for (int bits = kWarp / 2; bits > 0; bits /= 2) {
      greatest = fmaxf(greatest, __shfl_xor_sync(kAllLanes, greatest, bits));
    }
    // Relative to -inf every exponential would be inf - inf.
    const float shift = greatest == -INFINITY ? 0.0f : greatest;
    float sum = 0;
    for (int i = 0; i < kCount; ++i) {
      if (first + i < items) {
        sum += exp2f((static_cast<float>(scores.values[i]) - shift) * factor);
      }
    }
    for (int bits = kWarp / 2; bits > 0; bits /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, bits);
    }
    *reinterpret_cast<Run<Score, kCount>*>(values + row * stride + first) = scores;
    if (threadIdx.x % kWarp == 0) states[row * runs + first / kRun] = {greatest, sum};
  }
};

int64_t groups_per_head(const ScoreQueries& queries) { return (queries.rows + kRows - 1) / kRows; }

int64_t all_rows(const ScoreQueries& queries) { return queries.kv_heads * queries.rows; }

// The rows that a block scores: `count` of them from row `first` of all on, of one KV head.
struct Group {
  int64_t kv;
  int64_t first;
  int count;

  __device__ Group(int64_t number, int64_t rows) {
    const int64_t per_head = (rows + kRows - 1) / kRows;
    kv = number / per_head;
    const int64_t within = number % per_head * kRows;
    first = kv * rows + within;
    count = static_cast<int>(min(int64_t{kRows}, rows - within));
  }
};

// --- Queries -------------------------------------------------------------------------------------

constexpr int kTurnThreads = 128;

// A block per row, a thread per feature: neighbours read neighbouring numbers of the turn.
template <typename T>
__global__ void __launch_bounds__(kTurnThreads)
    turn_rows(const float* queries, int64_t rows, int64_t dim, const T* turn, float* turned) {
  const int64_t row = blockIdx.x;
  const T* own = turn + row / rows * dim * dim;
  for (int64_t d = threadIdx.x; d < dim; d += kTurnThreads) {
    float sum = 0;
    for (int64_t i = 0; i < dim; ++i) {
      sum += queries[row * dim + i] * to_float(own[i * dim + d]);
    }
    turned[row * dim + d] = sum;
  }
}

// --- From scores to their mean -------------------------------------------------------------------

constexpr int kJoinThreads = 128;

// A warp per row.
__global__ void __launch_bounds__(kJoinThreads)
    join_states(const State* states, int64_t runs, const float* factors, int64_t rows,
                RowWeight* weights) {
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * (kJoinThreads / kWarp) + threadIdx.x / kWarp;
  if (row >= rows) return;
  const int lane = threadIdx.x % kWarp;
  const float factor = factors == nullptr ? 1.0f : factors[row];
  const State* own = states + row * runs;
  float greatest = -INFINITY;
  for (int64_t i = lane; i < runs; i += kWarp) greatest = fmaxf(greatest, own[i].max);
  for (int bits = kWarp / 2; bits > 0; bits /= 2) {
    greatest = fmaxf(greatest, __shfl_xor_sync(kAllLanes, greatest, bits));
  }
  float sum = 0;
  for (int64_t i = lane; i < runs; i += kWarp) {
    sum += exp2f((own[i].max - greatest) * factor) * own[i].sum;
  }
  for (int bits = kWarp / 2; bits > 0; bits /= 2) sum += __shfl_xor_sync(kAllLanes, sum, bits);
  if (lane == 0) weights[row] = {greatest, factor, 1.0f / (sum * static_cast<float>(rows))};
}

constexpr int kMeanThreads = 256;

// A thread per item; the rows in order, so that sums are the same in each run.
template <typename Score>
__global__ void __launch_bounds__(kMeanThreads)
    add_weights(const Score* scores, int64_t stride, const RowWeight* weights, int64_t rows,
                int64_t items, float* out) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kMeanThreads + threadIdx.x;
  if (item >= items) return;
  float sum = 0;
#pragma unroll 8
  for (int64_t row = 0; row < rows; ++row) {
    const RowWeight weight = weights[row];
    const float score = static_cast<float>(scores[row * stride + item]);
    sum += exp2f((score - weight.max) * weight.factor) * weight.inverse;
  }
  out[item] = sum;
}

unsigned blocks_of(int64_t count, int64_t per_block) {
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

// `factors` of each row, null for 1.
template <typename Score, int kCount>
cudaError_t mean_softmax(const Scores<Score, kCount>& scores, const float* factors, int64_t rows,
                         int64_t items, RowWeight* weights, float* out, cudaStream_t stream) {
  const cudaError_t error = launch(join_states, blocks_of(rows, kJoinThreads / kWarp), kJoinThreads,
                                   0, stream, scores.states, scores.runs, factors, rows, weights);
  if (error != cudaSuccess) return error;
  return launch(add_weights<Score>, blocks_of(items, kMeanThreads), kMeanThreads, 0, stream,
                scores.values, scores.stride, weights, rows, items, out);
}

// --- Keys, feature by feature --------------------------------------------------------------------

constexpr int kKeyThreads = 128;  // a key each
constexpr int kFeatures = 64;     // at a time
// A row of the tile, four floats longer so that neighbouring threads read different banks.
constexpr int kTileStride = kFeatures + 4;

using KeyScores = Scores<float, 1>;

// Keys give columns: feature d of all keys of one KV head.
template <typename T>
struct PlainKeys {
  const T* data;
  int64_t items;
  int64_t dim;

  struct Column {
    const T* first;
    int64_t stride;
    __device__ float operator[](int64_t item) const { return to_float(first[item * stride]); }
  };
  __device__ Column column(int64_t kv, int64_t d) const {
    return {data + kv * items * dim + d, dim};
  }
  __device__ float unit(int64_t, int64_t) const { return 1.0f; }
};

struct CodedKeys {
  const uint8_t* data;
  const float* scales;
  int64_t items;
  int64_t dim;

  struct Column {
    const uint8_t* first;
    int64_t stride;
    int shift;
    __device__ float operator[](int64_t item) const {
      return static_cast<float>(first[item * stride] >> shift & 15);
    }
  };
  __device__ Column column(int64_t kv, int64_t d) const {
    const int64_t half = dim / 2;
    const bool low = d < half;
    return {data + kv * items * half + (low ? d : d - half), half, low ? 0 : 4};
  }
  __device__ float unit(int64_t kv, int64_t d) const { return scales[kv * dim + d]; }
};

// A block scores kKeyThreads keys with one group of rows. Both are staged in shared memory, a run
// of features at a time: neighbouring threads read neighbouring features from memory, and then a
// key of its own each from the tile.
template <typename Keys>
__global__ void __launch_bounds__(kKeyThreads, 4)
    score_tile(Keys keys, const float* queries, int64_t rows, float scale, int64_t tiles,
               KeyScores scores) {
  SWARM_KV_SHARED(tile, float4[kKeyThreads * kTileStride / 4]);
  SWARM_KV_SHARED(query, float4[kRows * kFeatures / 4]);
  const Group group(blockIdx.x / tiles, rows);
  const int64_t first = blockIdx.x % tiles * kKeyThreads;
  float* tile_features = reinterpret_cast<float*>(tile);
  float* query_features = reinterpret_cast<float*>(query);
  float sums[kRows] = {};
  for (int64_t begin = 0; begin < keys.dim; begin += kFeatures) {
    __syncthreads();  // the features before are done with
    const int64_t d = begin + threadIdx.x % kFeatures;
    const auto column = keys.column(group.kv, d);
#pragma unroll 8
    for (int key = threadIdx.x / kFeatures; key < kKeyThreads; key += kKeyThreads / kFeatures) {
      const bool inside = d < keys.dim && first + key < keys.items;
      tile_features[key * kTileStride + threadIdx.x % kFeatures] =
          inside ? column[first + key] : 0.0f;
    }
    for (int i = threadIdx.x; i < kRows * kFeatures; i += kKeyThreads) {
      const int row = i / kFeatures;
      const int64_t d = begin + i % kFeatures;
      const bool inside = row < group.count && d < keys.dim;
      query_features[i] =
          inside ? queries[(group.first + row) * keys.dim + d] * scale * keys.unit(group.kv, d)
                 : 0.0f;
    }
    __syncthreads();
    const int some = static_cast<int>(min(int64_t{kFeatures}, keys.dim - begin));
#pragma unroll 2
    for (int i = 0; i < (some + 3) / 4; ++i) {
      const float4 key = tile[threadIdx.x * (kTileStride / 4) + i];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const float4 q = query[row * (kFeatures / 4) + i];
        sums[row] += q.x * key.x + q.y * key.y + q.z * key.z + q.w * key.w;
      }
    }
  }
  if (first + threadIdx.x / kWarp * kWarp >= keys.items) return;  // the whole warp
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if (row < group.count) {
      scores.put(group.first + row, first + threadIdx.x, keys.items, 1.0f, {{sums[row]}});
    }
  }
}

struct KeyScratch {
  KeyScores scores;
  RowWeight* weights;

  KeyScratch(Workspace& workspace, const ScoreQueries& queries, int64_t items)
      : scores(workspace, all_rows(queries), items),
        weights(workspace.take<RowWeight>(all_rows(queries))) {}
};

template <typename Keys>
cudaError_t score(const ScoreQueries& queries, const Keys& keys, float scale, float* out,
                  void* memory, cudaStream_t stream) {
  Workspace workspace(memory);
  const KeyScratch scratch(workspace, queries, keys.items);
  const int64_t tiles = blocks_of(keys.items, kKeyThreads);
  const int64_t groups = queries.kv_heads * groups_per_head(queries);
  const cudaError_t error =
      launch(score_tile<Keys>, static_cast<unsigned>(tiles * groups), kKeyThreads, 0, stream, keys,
             queries.data, queries.rows, scale * kLog2e, tiles, scratch.scores);
  if (error != cudaSuccess) return error;
  return mean_softmax(scratch.scores, nullptr, all_rows(queries), keys.items, scratch.weights, out,
                      stream);
}

// --- Codes ---------------------------------------------------------------------------------------

constexpr int kCodeThreads = 256;
constexpr int kItems = 4;  // neighbouring items of a thread, whose codes are one word

// Eight floats of a table, one for each row.
struct alignas(16) Lanes {
  float4 low;
  float4 high;
};

// tables [groups][parts][codewords]: scale * (row . codeword). A block per part of a group, a
// thread per codeword.
__global__ void __launch_bounds__(kCodeThreads)
    fill_table(const float* queries, int64_t rows, int64_t dim, const float* codebooks,
               int64_t parts, int codewords, float scale, Lanes* tables) {
  const Group group(blockIdx.x / parts, rows);
  const int64_t part = blockIdx.x % parts;
  const int64_t part_dim = dim / parts;
  const int codeword = threadIdx.x;
  if (codeword >= codewords) return;
  const float* word = codebooks + ((group.kv * parts + part) * codewords + codeword) * part_dim;
  const float* query = queries + group.first * dim + part * part_dim;
  float sums[kRows] = {};
  for (int64_t d = 0; d < part_dim; ++d) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (row < group.count) sums[row] += scale * query[row * dim + d] * word[d];
    }
  }
  tables[static_cast<int64_t>(blockIdx.x) * codewords + codeword] = {
      make_float4(sums[0], sums[1], sums[2], sums[3]),
      make_float4(sums[4], sums[5], sums[6], sums[7])};
}

cudaError_t make_tables(const ScoreQueries& queries, const float* codebooks, int64_t parts,
                        int64_t codewords, float scale, Lanes* tables, cudaStream_t stream) {
  const int64_t groups = queries.kv_heads * groups_per_head(queries);
  const unsigned threads = blocks_of(codewords, kWarp) * kWarp;
  return launch(fill_table, static_cast<unsigned>(groups * parts), threads, 0, stream, queries.data,
                queries.rows, queries.dim, codebooks, parts, static_cast<int>(codewords), scale,
                tables);
}

// The codes of kItems neighbouring items, the first one in the low byte; 0 beyond the last item.
__device__ uint32_t load_codes(const uint8_t* plane, int64_t first, int64_t items) {
  const uint8_t* source = plane + first;
  if (first + kItems <= items && reinterpret_cast<uintptr_t>(source) % kItems == 0) {
    return *reinterpret_cast<const uint32_t*>(source);
  }
  uint32_t word = 0;
  for (int i = 0; i < kItems; ++i) {
    if (first + i < items) word |= static_cast<uint32_t>(source[i]) << (8 * i);
  }
  return word;
}

__device__ void add(const float4& more, float4& sum) {
  sum.x += more.x;
  sum.y += more.y;
  sum.z += more.z;
  sum.w += more.w;
}

__device__ float lane(const float4& values, int i) {
  return i == 0 ? values.x : i == 1 ? values.y : i == 2 ? values.z : values.w;
}

using CodeScores = Scores<float, kItems>;

// Small enough for several blocks on a multiprocessor; holds the tables of at least four parts.
constexpr int kSharedLanes = 1024;

// A block scores kCodeThreads * kItems items with one group of rows. Tables pass through shared
// memory a few parts at a time; one code fetches the values of all rows.
__global__ void __launch_bounds__(kCodeThreads)
    look_up(const Lanes* tables, const uint8_t* codes, int64_t rows, int parts, int codewords,
            int64_t items, int64_t tiles, CodeScores scores) {
  SWARM_KV_SHARED(table, Lanes[kSharedLanes]);
  const int64_t number = blockIdx.x / tiles;
  const Group group(number, rows);
  const int64_t first = (blockIdx.x % tiles * kCodeThreads + threadIdx.x) * kItems;
  const int at_a_time = kSharedLanes / codewords;
  Lanes sums[kItems] = {};
  for (int begin = 0; begin < parts; begin += at_a_time) {
    const int some = min(at_a_time, parts - begin);
    const Lanes* source = tables + (number * parts + begin) * codewords;
    __syncthreads();  // the parts before are done with
    for (int i = threadIdx.x; i < some * codewords; i += kCodeThreads) table[i] = source[i];
    __syncthreads();
    for (int part = 0; part < some; ++part) {
      const uint32_t word =
          load_codes(codes + (group.kv * parts + begin + part) * items, first, items);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int code = word >> (8 * i) & 255;
        device_check(code < codewords, "a code must be below the number of codewords");
        const Lanes& values = table[part * codewords + code];
        add(values.low, sums[i].low);
        add(values.high, sums[i].high);
      }
    }
  }
  if (first - threadIdx.x % kWarp * kItems >= items) return;  // the whole warp
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if (row >= group.count) continue;
    Run<float, kItems> run;
    for (int i = 0; i < kItems; ++i) {
      run.values[i] = row < 4 ? lane(sums[i].low, row) : lane(sums[i].high, row - 4);
    }
    scores.put(group.first + row, first, items, 1.0f, run);
  }
}

struct CodeScratch {
  Lanes* tables;
  CodeScores scores;
  RowWeight* weights;

  CodeScratch(Workspace& workspace, const ScoreQueries& queries, int64_t parts, int64_t codewords,
              int64_t items)
      : tables(
            workspace.take<Lanes>(queries.kv_heads * groups_per_head(queries) * parts * codewords)),
        scores(workspace, all_rows(queries), items),
        weights(workspace.take<RowWeight>(all_rows(queries))) {}
};

// --- Packed codes --------------------------------------------------------------------------------

constexpr int kCodewords = 16;

using PackedScores = Scores<uint16_t, kItems>;

// Rounds the tables of one group: a byte for each row, the first one lowest in x. What is taken off
// each part's values is the same for all items, so a softmax never sees it. steps [all rows]: what
// one is worth, to the base 2. A block per group; its threads share rows and parts.
__global__ void __launch_bounds__(kCodeThreads)
    round_tables(const float* tables, int64_t rows, int parts, uint8_t* rounded, float* steps) {
  constexpr int kShares = kCodeThreads / kRows;
  SWARM_KV_SHARED(ranges, float[kShares][kRows]);
  const int row = threadIdx.x % kRows, share = threadIdx.x / kRows;
  const int64_t base = static_cast<int64_t>(blockIdx.x) * parts * kCodewords * kRows + row;
  float range = 0;
  for (int part = share; part < parts; part += kShares) {
    const float* values = tables + base + part * kCodewords * kRows;
    float lowest = values[0], highest = values[0];
    for (int k = 1; k < kCodewords; ++k) {
      lowest = fminf(lowest, values[k * kRows]);
      highest = fmaxf(highest, values[k * kRows]);
    }
    range = fmaxf(range, highest - lowest);
  }
  ranges[share][row] = range;
  __syncthreads();
  for (int i = 0; i < kShares; ++i) range = fmaxf(range, ranges[i][row]);
  const float per_step = range > 0 ? kScanTableMax / range : 0;
  for (int part = share; part < parts; part += kShares) {
    const float* values = tables + base + part * kCodewords * kRows;
    uint8_t* target = rounded + base + part * kCodewords * kRows;
    float lowest = values[0];
    for (int k = 1; k < kCodewords; ++k) lowest = fminf(lowest, values[k * kRows]);
    for (int k = 0; k < kCodewords; ++k) {
      const float step = (values[k * kRows] - lowest) * per_step + 0.5f;
      target[k * kRows] = static_cast<uint8_t>(fminf(step, kScanTableMax + 0.5f));
    }
  }
  const Group group(blockIdx.x, rows);
  if (share == 0 && row < group.count) {
    steps[group.first + row] = range / kScanTableMax * kLog2e;
  }
}

// look_up with rounded tables, parts * 128 bytes of dynamic shared memory. A part's table takes
// each bank of shared memory once, so that no two codes get in each other's way. Two values add up
// within a byte, and all of them within 16 bits.
__global__ void __launch_bounds__(kCodeThreads)
    look_up_packed(const uint2* tables, const float* steps, const uint8_t* codes, int64_t rows,
                   int parts, int64_t items, int64_t tiles, PackedScores scores) {
  SWARM_KV_DYNAMIC_SHARED(shared);
  constexpr uint32_t kEvenBytes = 0x00ff00ffu;
  uint2* table = reinterpret_cast<uint2*>(shared);
  const int64_t number = blockIdx.x / tiles;
  const Group group(number, rows);
  const int64_t first = (blockIdx.x % tiles * kCodeThreads + threadIdx.x) * kItems;
  const uint2* source = tables + number * parts * kCodewords;
  for (int i = threadIdx.x; i < parts * kCodewords; i += kCodeThreads) table[i] = source[i];
  __syncthreads();
  if (first - threadIdx.x % kWarp * kItems >= items) return;  // the whole warp
  uint32_t sums[kItems][4] = {};  // two rows each: 0 and 2, 1 and 3, 4 and 6, 5 and 7
  const uint8_t* plane = codes + group.kv * (parts / 2) * items;
#pragma unroll 4
  for (int part = 0; part < parts; part += 2, plane += items) {
    const uint32_t word = load_codes(plane, first, items);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint2 even = table[part * kCodewords + (word >> (8 * i) & 15)];
      const uint2 odd = table[(part + 1) * kCodewords + (word >> (8 * i + 4) & 15)];
      const uint32_t low = even.x + odd.x, high = even.y + odd.y;
      sums[i][0] += low & kEvenBytes;
      sums[i][1] += low >> 8 & kEvenBytes;
      sums[i][2] += high & kEvenBytes;
      sums[i][3] += high >> 8 & kEvenBytes;
    }
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if (row >= group.count) continue;
    Run<uint16_t, kItems> run;
    for (int i = 0; i < kItems; ++i) {
      run.values[i] = static_cast<uint16_t>(sums[i][row / 4 * 2 + row % 2] >> (row % 4 / 2 * 16));
    }
    scores.put(group.first + row, first, items, steps[group.first + row], run);
  }
}

struct PackedScratch {
  Lanes* tables;
  uint2* rounded;
  float* steps;
  PackedScores scores;
  RowWeight* weights;

  PackedScratch(Workspace& workspace, const ScoreQueries& queries, int64_t parts, int64_t items)
      : tables(workspace.take<Lanes>(queries.kv_heads * groups_per_head(queries) * parts *
                                     kCodewords)),
        rounded(workspace.take<uint2>(queries.kv_heads * groups_per_head(queries) * parts *
                                      kCodewords)),
        steps(workspace.take<float>(all_rows(queries))),
        scores(workspace, all_rows(queries), items),
        weights(workspace.take<RowWeight>(all_rows(queries))) {}
};

// One block; `count` is not large where it is called, see score_codes of scoring_cuda.cpp.
__global__ void __launch_bounds__(kCodeThreads)
    greatest_code(const uint8_t* codes, int64_t count, int32_t* greatest) {
  SWARM_KV_SHARED(warps, int[kCodeThreads / kWarp]);
  int own = 0;
  for (int64_t i = threadIdx.x; i < count; i += kCodeThreads) {
    own = max(own, static_cast<int>(codes[i]));
  }
  own = __reduce_max_sync(kAllLanes, own);
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = own;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kCodeThreads / kWarp; ++i) own = max(own, warps[i]);
  *greatest = own;
}

}  // namespace

cudaError_t turn_queries(const ScoreQueries& queries, Values turn, float* turned,
                         cudaStream_t stream) {
  return with_type(turn, [&](const auto* data) {
    return launch(turn_rows<std::remove_cvref_t<decltype(*data)>>,
                  static_cast<unsigned>(all_rows(queries)), kTurnThreads, 0, stream, queries.data,
                  queries.rows, queries.dim, data, turned);
  });
}

size_t score_keys_scratch(const ScoreQueries& queries, int64_t items) {
  Workspace workspace(nullptr);
  KeyScratch(workspace, queries, items);
  return workspace.bytes();
}

cudaError_t score_keys(const ScoreQueries& queries, Values keys, int64_t items, float scale,
                       float* out, void* scratch, cudaStream_t stream) {
  return with_type(keys, [&](const auto* data) {
    return score(queries, PlainKeys<std::remove_cvref_t<decltype(*data)>>{data, items, queries.dim},
                 scale, out, scratch, stream);
  });
}

size_t score_coded_keys_scratch(const ScoreQueries& queries, int64_t items) {
  return score_keys_scratch(queries, items);
}

cudaError_t score_coded_keys(const ScoreQueries& queries, const uint8_t* keys, const float* scales,
                             int64_t items, float scale, float* out, void* scratch,
                             cudaStream_t stream) {
  return score(queries, CodedKeys{keys, scales, items, queries.dim}, scale, out, scratch, stream);
}

size_t score_codes_scratch(const ScoreQueries& queries, int64_t parts, int64_t codewords,
                           int64_t items) {
  Workspace workspace(nullptr);
  CodeScratch(workspace, queries, parts, codewords, items);
  return workspace.bytes();
}

cudaError_t score_codes(const ScoreQueries& queries, const float* codebooks, int64_t parts,
                        int64_t codewords, const uint8_t* codes, int64_t items, float scale,
                        float* out, void* memory, cudaStream_t stream) {
  Workspace workspace(memory);
  const CodeScratch scratch(workspace, queries, parts, codewords, items);
  const int64_t groups = queries.kv_heads * groups_per_head(queries);
  cudaError_t error =
      make_tables(queries, codebooks, parts, codewords, scale * kLog2e, scratch.tables, stream);
  if (error != cudaSuccess) return error;
  const int64_t tiles = blocks_of(items, kCodeThreads * kItems);
  error = launch(look_up, static_cast<unsigned>(tiles * groups), kCodeThreads, 0, stream,
                 scratch.tables, codes, queries.rows, static_cast<int>(parts),
                 static_cast<int>(codewords), items, tiles, scratch.scores);
  if (error != cudaSuccess) return error;
  return mean_softmax(scratch.scores, nullptr, all_rows(queries), items, scratch.weights, out,
                      stream);
}

size_t score_packed_codes_scratch(const ScoreQueries& queries, int64_t parts, int64_t items) {
  Workspace workspace(nullptr);
  PackedScratch(workspace, queries, parts, items);
  return workspace.bytes();
}

cudaError_t score_packed_codes(const ScoreQueries& queries, const float* codebooks, int64_t parts,
                               const uint8_t* codes, int64_t items, float scale, float* out,
                               void* memory, cudaStream_t stream) {
  Workspace workspace(memory);
  const PackedScratch scratch(workspace, queries, parts, items);
  const int64_t groups = queries.kv_heads * groups_per_head(queries);
  cudaError_t error =
      make_tables(queries, codebooks, parts, kCodewords, scale, scratch.tables, stream);
  if (error != cudaSuccess) return error;
  error =
      launch(round_tables, static_cast<unsigned>(groups), kCodeThreads, 0, stream,
             reinterpret_cast<const float*>(scratch.tables), queries.rows, static_cast<int>(parts),
             reinterpret_cast<uint8_t*>(scratch.rounded), scratch.steps);
  if (error != cudaSuccess) return error;
  const int64_t tiles = blocks_of(items, kCodeThreads * kItems);
  const size_t shared = static_cast<size_t>(parts) * kCodewords * sizeof(uint2);
  error = launch(look_up_packed, static_cast<unsigned>(tiles * groups), kCodeThreads, shared,
                 stream, scratch.rounded, scratch.steps, codes, queries.rows,
                 static_cast<int>(parts), items, tiles, scratch.scores);
  if (error != cudaSuccess) return error;
  return mean_softmax(scratch.scores, scratch.steps, all_rows(queries), items, scratch.weights, out,
                      stream);
}

cudaError_t max_code(const uint8_t* codes, int64_t count, int32_t* greatest, cudaStream_t stream) {
  return launch(greatest_code, 1, kCodeThreads, 0, stream, codes, count, greatest);
}

}  // namespace swarm_kv::cuda
