#include "ops/cuda/device.h"
#include "ops/cuda/radix_select.h"
#include "ops/cuda/signature.h"
#include "ops/cuda/workspace.h"

namespace swarm_kv::cuda {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kQueries = 64;  // of one wave: a word of bits
constexpr int kKeys = 64;     // that a block scores at a time
constexpr int kDepth = 32;    // features at a time
constexpr int kOwn = 4;       // queries and keys of a thread
constexpr int kSide = 16;     // threads along queries, and along keys
static_assert(kSide * kSide == kThreads && kSide * kOwn == kQueries && kSide * kOwn == kKeys);

// Parts into which the keys are cut for the log-sum-exp. Fixed, since sums depend on them.
constexpr int64_t kMostParts = 128;

// Scores are kept as logarithms to the base 2, whose exponential is one instruction.
constexpr float kLog2e = 1.44269504f;
// The exponent of the smallest normal float, below which a probability counts as 0.
constexpr float kLowest = -126.0f;

int64_t ceil_div(int64_t count, int64_t per) { return (count + per - 1) / per; }

// --- Checks --------------------------------------------------------------------------------------

__global__ void clear_extremes(SignatureExtremes* extremes, bool any) {
  if (threadIdx.x == 0) *extremes = {0, 0, 0, any ? 0x7fffffff : 0};
}

// Magnitudes order as their bit patterns do, with infinity and then NaN on top.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    add_magnitudes(const T* values, int64_t heads, int64_t rows, int64_t dim, int64_t head_stride,
                   int64_t row_stride, float* largest) {
  const int64_t count = heads * rows * dim;
  int own = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t row = i / dim;
    const T value = values[row / rows * head_stride + row % rows * row_stride + i % dim];
    own = max(own, static_cast<int>(__float_as_uint(to_float(value)) & 0x7fffffffu));
  }
  own = __reduce_max_sync(kAllLanes, own);
  if (threadIdx.x % kWarp == 0) atomicMax(reinterpret_cast<int*>(largest), own);
}

__global__ void __launch_bounds__(kThreads)
    least_position(const int64_t* positions, int64_t count, int32_t* least) {
  int own = 0x7fffffff;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    own = min(own, static_cast<int>(max(int64_t{-1}, min(positions[i], int64_t{0x7fffffff}))));
  }
  own = __reduce_min_sync(kAllLanes, own);
  if (threadIdx.x % kWarp == 0) atomicMin(least, own);
}

unsigned few_blocks(int64_t count) {
  constexpr int64_t kMostBlocks = 1024;
  const int64_t needed = ceil_div(count, kThreads);
  return static_cast<unsigned>(needed < kMostBlocks ? needed : kMostBlocks);
}

template <typename T>
cudaError_t magnitudes(const T* values, int64_t heads, int64_t rows, int64_t dim,
                       int64_t head_stride, int64_t row_stride, float* largest,
                       cudaStream_t stream) {
  const int64_t count = heads * rows * dim;
  if (count == 0) return cudaSuccess;
  return launch(add_magnitudes<T>, few_blocks(count), kThreads, 0, stream, values, heads, rows, dim,
                head_stride, row_stride, largest);
}

// --- Scores of one wave --------------------------------------------------------------------------

// Keys of T as a kernel sees them.
template <typename T>
struct Keys {
  const T* data;
  int64_t heads;
  int64_t rows;
  int64_t head_stride;
  int64_t row_stride;
};

// The queries of all waves, and what each may see.
struct Queries {
  const float* data;
  int64_t heads;
  int64_t count;
  int64_t dim;
  float scale;              // to the base 2
  const int32_t* seen;      // [waves][kQueries]: keys that the query sees: [0, seen)
  const int32_t* eligible;  // [waves][kQueries]: keys that it may activate: [sinks, eligible)
};

// The greatest of a wave's limits.
struct Limits {
  int32_t seen;
  int32_t eligible;
};

// Threads of queries beyond the last one see nothing. A block per wave.
__global__ void __launch_bounds__(kQueries)
    make_limits(const int64_t* position, int64_t count, int64_t keys, int64_t window, int32_t* seen,
                int32_t* eligible, Limits* limits) {
  SWARM_KV_SHARED(greatest, Limits[kQueries / kWarp]);
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kQueries + threadIdx.x;
  Limits own = {0, 0};
  if (t < count) {
    const int64_t at = position[t];
    own.seen = static_cast<int32_t>(min(at, keys - 1) + 1);
    own.eligible = static_cast<int32_t>(max(int64_t{-1}, min(at - window, keys - 1)) + 1);
  }
  seen[t] = own.seen;
  eligible[t] = own.eligible;
  own = {__reduce_max_sync(kAllLanes, own.seen), __reduce_max_sync(kAllLanes, own.eligible)};
  if (threadIdx.x % kWarp == 0) greatest[threadIdx.x / kWarp] = own;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kQueries / kWarp; ++i) {
    own.seen = max(own.seen, greatest[i].seen);
    own.eligible = max(own.eligible, greatest[i].eligible);
  }
  limits[blockIdx.x] = own;
}

// Features of queries and keys, feature by feature. A few floats longer than a tile, so that the
// threads which fill it write to different banks.
struct Tile {
  float4 queries[kDepth][kQueries / 4 + 1];
  float4 keys[kDepth][kKeys / 4 + 1];
};

// scores[i][j] of the thread's queries threadIdx.x / kSide * kOwn + i of the wave and keys first +
// threadIdx.x % kSide * kOwn + j. Called by a whole block.
template <typename T>
__device__ void score_tile(const Queries& q, const Keys<T>& k, int64_t wave, int64_t head,
                           int64_t first, Tile& tile, float (&scores)[kOwn][kOwn]) {
  const float* query = q.data + (head * q.count + wave * kQueries) * q.dim;
  const T* key = k.data + head / (q.heads / k.heads) * k.head_stride + first * k.row_stride;
  const int query_group = threadIdx.x / kSide, key_group = threadIdx.x % kSide;
  for (int i = 0; i < kOwn; ++i) {
    for (int j = 0; j < kOwn; ++j) scores[i][j] = 0;
  }
  for (int64_t begin = 0; begin < q.dim; begin += kDepth) {
    const int some = static_cast<int>(min(int64_t{kDepth}, q.dim - begin));
    __syncthreads();  // the features before are done with
#pragma unroll 4
    for (int i = threadIdx.x; i < kQueries * kDepth; i += kThreads) {
      const int t = i / kDepth, d = i % kDepth;
      const bool inside = d < some && wave * kQueries + t < q.count;
      reinterpret_cast<float*>(tile.queries[d])[t] =
          inside ? query[t * q.dim + begin + d] * q.scale : 0.0f;
    }
#pragma unroll 4
    for (int i = threadIdx.x; i < kKeys * kDepth; i += kThreads) {
      const int j = i / kDepth, d = i % kDepth;
      const bool inside = d < some && first + j < k.rows;
      reinterpret_cast<float*>(tile.keys[d])[j] =
          inside ? to_float(key[j * k.row_stride + begin + d]) : 0.0f;
    }
    __syncthreads();
#pragma unroll 8
    for (int d = 0; d < some; ++d) {
      const float4 a = tile.queries[d][query_group];
      const float4 b = tile.keys[d][key_group];
      const float rows[kOwn] = {a.x, a.y, a.z, a.w};
      const float columns[kOwn] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int j = 0; j < kOwn; ++j) scores[i][j] += rows[i] * columns[j];
      }
    }
  }
}

// --- Log-sum-exp ---------------------------------------------------------------------------------

// log2 of the sum of 2^score is max + log2(sum); sum = 0 stands for no keys.
struct Normaliser {
  float max;
  float sum;
};

__device__ Normaliser nothing() { return {-INFINITY, 0}; }

__device__ void add(const Normaliser& more, Normaliser& total) {
  const float greatest = fmaxf(more.max, total.max);
  if (greatest == -INFINITY) return;
  total.sum = total.sum * exp2f(total.max - greatest) + more.sum * exp2f(more.max - greatest);
  total.max = greatest;
}

// normalisers [heads][parts][kQueries] of one wave: a block per part of the keys and head.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    sum_scores(Queries q, Keys<T> k, int64_t wave, const Limits* limits, int64_t parts,
               int64_t part_keys, Normaliser* normalisers) {
  SWARM_KV_SHARED(tile, Tile);
  const int64_t head = blockIdx.x / parts, part = blockIdx.x % parts;
  const int64_t begin = part * part_keys;
  const int64_t end = min(begin + part_keys, static_cast<int64_t>(limits[wave].seen));
  const int query = threadIdx.x / kSide * kOwn, key = threadIdx.x % kSide * kOwn;
  Normaliser own[kOwn] = {nothing(), nothing(), nothing(), nothing()};
  for (int64_t first = begin; first < end; first += kKeys) {
    float scores[kOwn][kOwn];
    score_tile(q, k, wave, head, first, tile, scores);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int32_t seen = q.seen[wave * kQueries + query + i];
      Normaliser four = nothing();
      for (int j = 0; j < kOwn; ++j) {
        if (first + key + j >= seen) scores[i][j] = -INFINITY;
        four.max = fmaxf(four.max, scores[i][j]);
      }
      if (four.max == -INFINITY) continue;
      for (int j = 0; j < kOwn; ++j) four.sum += exp2f(scores[i][j] - four.max);
      add(four, own[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    for (int bits = kSide / 2; bits > 0; bits /= 2) {
      const Normaliser other = {__shfl_xor_sync(kAllLanes, own[i].max, bits),
                                __shfl_xor_sync(kAllLanes, own[i].sum, bits)};
      add(other, own[i]);
    }
    if (key == 0) normalisers[blockIdx.x * kQueries + query + i] = own[i];
  }
}

// lse [heads][kQueries] of one wave, to the base 2: from `given` [heads, queries] where that is not
// null. A block per head.
__global__ void __launch_bounds__(kQueries)
    make_lse(const float* given, int64_t queries, int64_t wave, const Normaliser* normalisers,
             int64_t parts, float* lse) {
  const int64_t head = blockIdx.x, t = wave * kQueries + threadIdx.x;
  float value = 0;
  if (given != nullptr) {
    if (t < queries) value = given[head * queries + t] * kLog2e;
  } else {
    Normaliser total = nothing();
    for (int64_t part = 0; part < parts; ++part) {
      add(normalisers[(head * parts + part) * kQueries + threadIdx.x], total);
    }
    value = total.max + log2f(total.sum);
  }
  lse[head * kQueries + threadIdx.x] = value;
}

// --- Probabilities, thresholds, bits -------------------------------------------------------------

// probabilities [kQueries][stride] of one wave: the sum (which ranks as the mean does) or maximum
// over the query heads [first_head, last_head); 0 for keys that are not eligible. A block per tile
// of keys; tiles beyond the last eligible key are not written.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    add_probabilities(Queries q, Keys<T> k, int64_t wave, const Limits* limits, int64_t first_head,
                      int64_t last_head, bool maximum, int64_t sinks, const float* lse,
                      int64_t stride, float* probabilities) {
  SWARM_KV_SHARED(tile, Tile);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kKeys;
  if (first >= limits[wave].eligible) return;  // the whole block
  const int query = threadIdx.x / kSide * kOwn, key = threadIdx.x % kSide * kOwn;
  float total[kOwn][kOwn] = {};
  for (int64_t head = first_head; head < last_head; ++head) {
    float scores[kOwn][kOwn];
    score_tile(q, k, wave, head, first, tile, scores);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float shift = lse[head * kQueries + query + i];
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        const float x = fminf(scores[i][j] - shift, 0.0f);
        const float probability = x < kLowest ? 0.0f : exp2f(x);
        total[i][j] = maximum ? fmaxf(total[i][j], probability) : total[i][j] + probability;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int32_t eligible = q.eligible[wave * kQueries + query + i];
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const int64_t at = first + key + j;
      if (at < sinks || at >= eligible) total[i][j] = 0;
    }
    *reinterpret_cast<float4*>(probabilities + (query + i) * stride + first + key) =
        make_float4(total[i][0], total[i][1], total[i][2], total[i][3]);
  }
}

// A key's rank among those of its query; 0 for one that is not eligible.
__device__ unsigned long long rank_of(float probability, int64_t key) {
  return probability > 0 ? ranking_key(probability, key) : 0;
}

// thresholds [kQueries]: the least rank that is activated. A block per query.
__global__ void __launch_bounds__(kThreads)
    select_thresholds(const float* probabilities, int64_t stride, const int32_t* eligible,
                      int64_t sinks, int64_t wave, int64_t budget, unsigned long long* thresholds) {
  SWARM_KV_SHARED(storage, RadixSelectStorage);
  const float* own = probabilities + blockIdx.x * stride;
  const int64_t last = eligible[wave * kQueries + blockIdx.x];
  unsigned long long threshold = 1;
  // With no more keys than the budget each is activated.
  if (last - sinks > budget) {
    threshold = radix_select<kThreads>(
        last - sinks, budget, [&](int64_t i) { return rank_of(own[sinks + i], sinks + i); },
        storage);
  }
  if (threadIdx.x == 0) thresholds[blockIdx.x] = threshold;
}

// bits[key * words + wave], replaced or added to. A thread per key.
__global__ void __launch_bounds__(kThreads)
    pack_bits(const float* probabilities, int64_t stride, const Limits* limits, int64_t wave,
              const unsigned long long* thresholds, int64_t keys, int64_t words, bool replace,
              int64_t* bits) {
  const int64_t key = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (key >= keys) return;
  unsigned long long word = 0;
  if (key < limits[wave].eligible) {
#pragma unroll 8
    for (int t = 0; t < kQueries; ++t) {
      const bool active = rank_of(probabilities[t * stride + key], key) >= thresholds[t];
      word |= static_cast<unsigned long long>(active) << t;
    }
  }
  int64_t& target = bits[key * words + wave];
  target = static_cast<int64_t>(replace ? word : word | static_cast<unsigned long long>(target));
}

// --- All waves -----------------------------------------------------------------------------------

struct Scratch {
  int64_t waves;
  int64_t part_keys;
  int64_t parts;
  int64_t stride;
  int32_t* seen;
  int32_t* eligible;
  Limits* limits;
  Normaliser* normalisers;
  float* lse;
  float* probabilities;
  unsigned long long* thresholds;

  Scratch(Workspace& workspace, const SignatureQueries& q, const SignatureKeys& k)
      : waves(ceil_div(q.count, kQueries)),
        part_keys(ceil_div(ceil_div(k.rows, kKeys), kMostParts) * kKeys),
        parts(part_keys == 0 ? 0 : ceil_div(k.rows, part_keys)),
        stride(ceil_div(k.rows, kKeys) * kKeys) {
    seen = workspace.take<int32_t>(waves * kQueries);
    eligible = workspace.take<int32_t>(waves * kQueries);
    limits = workspace.take<Limits>(waves);
    normalisers = workspace.take<Normaliser>(q.lse == nullptr ? q.heads * parts * kQueries : 0);
    lse = workspace.take<float>(q.heads * kQueries);
    probabilities = workspace.take<float>(kQueries * stride);
    thresholds = workspace.take<unsigned long long>(kQueries);
  }
};

template <typename T>
cudaError_t profile(const SignatureQueries& q, const Keys<T>& keys, const Scratch& scratch,
                    const SignatureOptions& options, int64_t* bits, cudaStream_t stream) {
  const Queries queries{
      q.data,       q.heads,         q.count, q.dim, static_cast<float>(options.scale) * kLog2e,
      scratch.seen, scratch.eligible};
  const int64_t budget = activation_budget(options, keys.rows);
  cudaError_t error =
      launch(make_limits, static_cast<unsigned>(scratch.waves), kQueries, 0, stream, q.position,
             q.count, keys.rows, options.window, scratch.seen, scratch.eligible, scratch.limits);
  const auto then = [&](auto kernel, int64_t blocks, int threads, const auto&... arguments) {
    if (error != cudaSuccess) return;
    error = launch(kernel, static_cast<unsigned>(blocks), threads, 0, stream, arguments...);
  };
  const int64_t heads_at_a_time = options.heads == HeadAggregation::kUnion ? 1 : q.heads;
  for (int64_t wave = 0; wave < scratch.waves; ++wave) {
    if (q.lse == nullptr) {
      then(sum_scores<T>, q.heads * scratch.parts, kThreads, queries, keys, wave, scratch.limits,
           scratch.parts, scratch.part_keys, scratch.normalisers);
    }
    then(make_lse, q.heads, kQueries, q.lse, q.count, wave, scratch.normalisers, scratch.parts,
         scratch.lse);
    for (int64_t head = 0; head < q.heads; head += heads_at_a_time) {
      then(add_probabilities<T>, scratch.stride / kKeys, kThreads, queries, keys, wave,
           scratch.limits, head, head + heads_at_a_time, options.heads == HeadAggregation::kMax,
           options.sinks, scratch.lse, scratch.stride, scratch.probabilities);
      then(select_thresholds, kQueries, kThreads, scratch.probabilities, scratch.stride,
           scratch.eligible, options.sinks, wave, budget, scratch.thresholds);
      then(pack_bits, ceil_div(keys.rows, kThreads), kThreads, scratch.probabilities,
           scratch.stride, scratch.limits, wave, scratch.thresholds, keys.rows, scratch.waves,
           head == 0, bits);
    }
  }
  return error;
}

}  // namespace

cudaError_t signature_extremes(const SignatureQueries& q, const SignatureKeys& k,
                               SignatureExtremes* extremes, cudaStream_t stream) {
  cudaError_t error = launch(clear_extremes, 1, kWarp, 0, stream, extremes, q.count > 0);
  if (error != cudaSuccess) return error;
  if (q.count > 0) {
    error = launch(least_position, few_blocks(q.count), kThreads, 0, stream, q.position, q.count,
                   &extremes->positions);
    if (error != cudaSuccess) return error;
  }
  error = magnitudes(q.data, q.heads, q.count, q.dim, q.count * q.dim, q.dim, &extremes->q, stream);
  if (error != cudaSuccess) return error;
  error = with_type(k.values, [&](const auto* keys) {
    return magnitudes(keys, k.heads, k.rows, q.dim, k.head_stride, k.row_stride, &extremes->k,
                      stream);
  });
  if (error != cudaSuccess || q.lse == nullptr) return error;
  return magnitudes(q.lse, 1, q.heads, q.count, 0, q.count, &extremes->lse, stream);
}

size_t signature_scratch(const SignatureQueries& q, const SignatureKeys& k) {
  Workspace workspace(nullptr);
  Scratch(workspace, q, k);
  return workspace.bytes();
}

cudaError_t activation_signatures(const SignatureQueries& q, const SignatureKeys& k,
                                  const SignatureOptions& options, int64_t* bits, void* memory,
                                  cudaStream_t stream) {
  if (q.count == 0 || k.rows == 0) return cudaSuccess;
  Workspace workspace(memory);
  const Scratch scratch(workspace, q, k);
  return with_type(k.values, [&](const auto* data) {
    return profile(q, Keys{data, k.heads, k.rows, k.head_stride, k.row_stride}, scratch, options,
                   bits, stream);
  });
}

}  // namespace swarm_kv::cuda
