#include "ops/cuda/attention.h"

namespace swarm_kv::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr unsigned kAll = 0xffffffffu;
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

// ---- how the work is cut
//
// Rows differ in length by orders of magnitude, so blocks take equal pieces of all lists end to
// end. A piece may hold the ends of several rows: chunk c gives row r the partial result c + r, a
// number that no other pair has, since r only grows with c.

// What a block does: one chunk, for one KV head and some of the query heads that share it.
struct Work {
  int64_t chunk;
  int64_t kv_head;
  int64_t head;  // the first query head
  int heads;
};

__host__ __device__ int64_t chunks_of(const SparseAttention& call) {
  return (call.total + call.chunk - 1) / call.chunk;
}

// Partial results [chunks + rows, query_heads, dim] lie in scratch, then their log-sum-exps
// [chunks + rows, query_heads].
__device__ float* partial_out(const SparseAttention& call, int64_t partial, int64_t head) {
  return call.scratch + (partial * call.query_heads + head) * call.dim;
}

__device__ float* partial_lse(const SparseAttention& call, int64_t partial, int64_t head) {
  return partial_out(call, chunks_of(call) + call.rows, 0) + partial * call.query_heads + head;
}

__host__ __device__ int64_t head_tiles(const SparseAttention& call, int heads) {
  return (call.query_heads / call.kv_heads + heads - 1) / heads;
}

// Blocks are numbered so that those which run at the same time find each other's entries in the
// cache. KV heads change fastest: those of one entry lie side by side in memory. Chunks come from
// all over the list in turns: rows often have the same entries, as new tokens of one sequence do.
__host__ __device__ int64_t turns_of(const SparseAttention& call) {
  const int64_t chunks = chunks_of(call);
  return call.rows < chunks ? call.rows : chunks;
}

__host__ __device__ int64_t chunks_per_turn(const SparseAttention& call) {
  return (chunks_of(call) + turns_of(call) - 1) / turns_of(call);
}

template <int kHeads>
__device__ Work work_of(const SparseAttention& call) {
  const int64_t group = call.query_heads / call.kv_heads;
  const int64_t tiles = head_tiles(call, kHeads);
  const int64_t block = blockIdx.x;
  const int64_t tile = block % tiles;
  const int64_t kv_head = block / tiles % call.kv_heads;
  const int64_t turn = block / tiles / call.kv_heads;
  const int64_t chunk = turn % turns_of(call) * chunks_per_turn(call) + turn / turns_of(call);
  const int64_t left = group - tile * kHeads;
  return {chunk, kv_head, kv_head * group + tile * kHeads,
          static_cast<int>(left < kHeads ? left : kHeads)};
}

// Calls body(row, first, last) for the part of each row that lies in the chunk, by all threads; a
// chunk beyond the last has none.
template <typename Body>
__device__ void for_each_row(const SparseAttention& call, int64_t chunk, Body body) {
  int64_t first = chunk * call.chunk;
  const int64_t end = first + call.chunk < call.total ? first + call.chunk : call.total;
  // The last row that begins at `first` or before.
  int64_t row = 0;
  for (int64_t above = call.rows; above - row > 1;) {
    const int64_t middle = (row + above) / 2;
    if (call.row_offsets[middle] <= first) {
      row = middle;
    } else {
      above = middle;
    }
  }
  for (; first < end && row < call.rows; ++row) {
    const int64_t row_end = call.row_offsets[row + 1];
    const int64_t last = row_end < end ? row_end : end;
    if (first >= last) continue;
    body(row, first, last);
    first = last;
  }
}

// The slot of entry `i`, of the last one beyond the end: what is not counted may be read as well.
// -1 for a slot that must not be read; the host, which would have to wait for it, has not looked at
// it.
template <typename T>
__device__ __forceinline__ int64_t slot_at(const SparseAttention& call, int64_t i, int64_t last) {
  const int64_t slot = call.slots[i < last ? i : last - 1];
  const bool inside = slot >= 0 && slot <= call.pool_size - 2 * call.kv_heads * call.dim;
  return inside && slot % static_cast<int64_t>(16 / sizeof(T)) == 0 ? slot : -1;
}

__device__ __forceinline__ int64_t readable(int64_t slot) { return slot < 0 ? 0 : slot; }

// ---- arithmetic

// Scores are kept in base 2: exp2f is what the device has.
__device__ __forceinline__ float to_base2(const SparseAttention& call, float product) {
  const float score = product * call.scale;
  if (call.softcap == 0) return score * kLog2E;
  const float x = score / call.softcap;
  const float e = exp2f(-2 * kLog2E * fabsf(x));
  return copysignf(call.softcap * kLog2E * ((1 - e) / (1 + e)), x);
}

// What exponentials are relative to: -inf, which no score exceeded, would make inf - inf of all.
__device__ __forceinline__ float finite(float max) { return max == -INFINITY ? 0.0f : max; }

__device__ __forceinline__ float inverse_of(float sum) { return sum == 0 ? 0.0f : 1 / sum; }

__device__ __forceinline__ uint32_t word(const uint4& vector, int i) {
  return i == 0 ? vector.x : i == 1 ? vector.y : i == 2 ? vector.z : vector.w;
}

// ---- Half and BFloat16: tensor cores
//
// A warp takes 16 entries at a time. Their keys and values go from memory to registers as they are,
// 16 bytes a lane: in a product's inner dimension any order is right that both sides have, and the
// order of outer dimensions is undone when results are written. With g = lane / 4 and t = lane % 4
// (see multiply_add), a lane holds
//   of keys    entries g and g + 8, features 32i + 8t .. + 8
//   of values  entries 2t, 2t + 1, 2t + 8, 2t + 9, features 64m + 8g .. + 8
// Scores [heads, entries] come out where weights [entries, heads] are wanted.

// Blocks per multiprocessor, which bound the registers of a thread: below 128, 168 or 255 of them.
__host__ __device__ constexpr int blocks_of(int features) {
  return features > 128 ? 2 : features > 64 ? 3 : 4;
}

template <typename T, int kDim, int kOctets>
__global__ void __launch_bounds__(kThreads, blocks_of(kDim* kOctets))
    attend_halves(SparseAttention call) {
  constexpr int kHeads = 8 * kOctets;
  // Values are under way while keys are multiplied, where there are registers for both.
  constexpr bool kEarly = kDim < 256;
  SWARM_KV_SHARED(warp_max, float[kWarps][kHeads]);
  SWARM_KV_SHARED(warp_sum, float[kWarps][kHeads]);
  SWARM_KV_SHARED(warp_out, float[kWarps][kHeads][kDim]);

  const Work work = work_of<kHeads>(call);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int g = lane / 4;
  const int t = lane % 4;
  const T* keys = static_cast<const T*>(call.pool) + work.kv_head * kDim + 8 * t;
  const T* values =
      static_cast<const T*>(call.pool) + (call.kv_heads + work.kv_head) * kDim + 8 * g;

  for_each_row(call, work.chunk, [&](int64_t row, int64_t first, int64_t last) {
    const T* queries =
        static_cast<const T*>(call.q) + (row * call.query_heads + work.head) * kDim + 8 * t;
    uint4 query[kOctets][kDim / 32];
    for (int o = 0; o < kOctets; ++o) {
      for (int i = 0; i < kDim / 32; ++i) {
        query[o][i] = 8 * o + g < work.heads ? load<uint4>(queries + (8 * o + g) * kDim + 32 * i)
                                             : make_uint4(0, 0, 0, 0);
      }
    }
    float max[kOctets], sum[kOctets];  // of heads 8o + g; sums over this lane's entries alone
    float out[kDim / 64][4][kOctets][4];
    for (int o = 0; o < kOctets; ++o) {
      max[o] = -INFINITY;
      sum[o] = 0;
    }
    for (int m = 0; m < kDim / 64; ++m) {
      for (int r = 0; r < 4; ++r) {
        for (int o = 0; o < kOctets; ++o) {
          for (int c = 0; c < 4; ++c) out[m][r][o][c] = 0;
        }
      }
    }

    int64_t tile = first + 16 * warp;
    int64_t slot = slot_at<T>(call, tile + lane % 16, last);
    for (; tile < last; tile += 16 * kWarps) {
      uint4 key[2][kDim / 32];
      for (int e = 0; e < 2; ++e) {
        const int64_t from = readable(__shfl_sync(kAll, slot, g + 8 * e));
        for (int i = 0; i < kDim / 32; ++i) key[e][i] = load<uint4>(keys + from + 32 * i);
      }
      int64_t value_slots[4];
      for (int j = 0; j < 4; ++j) {
        value_slots[j] = __shfl_sync(kAll, slot, 2 * t + j % 2 + j / 2 * 8);
      }
      slot = slot_at<T>(call, tile + 16 * kWarps + lane % 16, last);
      uint4 value[kEarly ? kDim / 64 : 1][4];
      const auto load_values = [&](int m) {
        for (int j = 0; j < 4; ++j) {
          value[kEarly ? m : 0][j] = load<uint4>(values + readable(value_slots[j]) + 64 * m);
        }
      };
      if (kEarly) {
        for (int m = 0; m < kDim / 64; ++m) load_values(m);
      }

      float score[2][4] = {};
      for (int i = 0; i < kDim / 32; ++i) {
        const uint4 low = query[0][i];
        const uint4 high = kOctets == 2 ? query[kOctets - 1][i] : make_uint4(0, 0, 0, 0);
        for (int e = 0; e < 2; ++e) {
          multiply_add<T>(score[e], {low.x, high.x, low.y, high.y}, {key[e][i].x, key[e][i].y});
          multiply_add<T>(score[e], {low.z, high.z, low.w, high.w}, {key[e][i].z, key[e][i].w});
        }
      }

      float rescale[kOctets];
      uint32_t weights[kOctets][2];
      bool grown = false;
      for (int o = 0; o < kOctets; ++o) {
        float weight[4];
        float top = max[o];
        for (int j = 0; j < 4; ++j) {
          const bool counts = tile + j / 2 * 8 + 2 * t + j % 2 < last;
          weight[j] = !counts              ? -INFINITY
                      : value_slots[j] < 0 ? NAN
                                           : to_base2(call, score[j / 2][2 * o + j % 2]);
          top = fmaxf(top, weight[j]);
        }
        top = fmaxf(top, __shfl_xor_sync(kAll, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kAll, top, 2));
        const float shift = finite(top);
        rescale[o] = exp2f(max[o] - shift);
        grown = grown || max[o] != top;
        max[o] = top;
        sum[o] *= rescale[o];
        for (int j = 0; j < 4; ++j) {
          weight[j] = exp2f(weight[j] - shift);
          sum[o] += weight[j];
        }
        weights[o][0] = pack<T>(weight[0], weight[1]);
        weights[o][1] = pack<T>(weight[2], weight[3]);
      }
      if (__any_sync(kAll, grown)) {
        for (int o = 0; o < kOctets; ++o) {
          // out has heads 2t and 2t + 1.
          const float even = __shfl_sync(kAll, rescale[o], 8 * t);
          const float odd = __shfl_sync(kAll, rescale[o], 8 * t + 4);
          for (int m = 0; m < kDim / 64; ++m) {
            for (int r = 0; r < 4; ++r) {
              for (int c = 0; c < 4; ++c) out[m][r][o][c] *= c % 2 == 0 ? even : odd;
            }
          }
        }
      }
      for (int m = 0; m < kDim / 64; ++m) {
        if (!kEarly) load_values(m);
        const uint4(&four)[4] = value[kEarly ? m : 0];
        for (int r = 0; r < 4; ++r) {
          // Features 2r and 2r + 1 of the eight: each of two entries in one register.
          const uint32_t a = word(four[0], r), b = word(four[1], r);
          const uint32_t c = word(four[2], r), d = word(four[3], r);
          const uint32_t transposed[4] = {__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632),
                                          __byte_perm(c, d, 0x5410), __byte_perm(c, d, 0x7632)};
          for (int o = 0; o < kOctets; ++o) multiply_add<T>(out[m][r][o], transposed, weights[o]);
        }
      }
    }

    // The warps' results become one.
    for (int o = 0; o < kOctets; ++o) {
      sum[o] += __shfl_xor_sync(kAll, sum[o], 1);
      sum[o] += __shfl_xor_sync(kAll, sum[o], 2);
      if (t == 0) {
        warp_max[warp][8 * o + g] = max[o];
        warp_sum[warp][8 * o + g] = sum[o];
      }
    }
    __syncthreads();
    const auto total_of = [&](int head, float& shift) {
      float top = -INFINITY, total = 0;
      for (int w = 0; w < kWarps; ++w) top = fmaxf(top, warp_max[w][head]);
      shift = finite(top);
      for (int w = 0; w < kWarps; ++w) {
        total += warp_sum[w][head] * exp2f(warp_max[w][head] - shift);
      }
      return total;
    };
    for (int o = 0; o < kOctets; ++o) {
      for (int parity = 0; parity < 2; ++parity) {
        const int head = 8 * o + 2 * t + parity;
        float shift;
        const float inverse = inverse_of(total_of(head, shift));
        const float weight = inverse * exp2f(warp_max[warp][head] - shift);
        for (int m = 0; m < kDim / 64; ++m) {
          for (int r = 0; r < 4; ++r) {
            float* target = &warp_out[warp][head][64 * m + 8 * g + 2 * r];
            target[0] = weight * out[m][r][o][parity];
            target[1] = weight * out[m][r][o][2 + parity];
          }
        }
      }
    }
    __syncthreads();
    float* target = partial_out(call, work.chunk + row, work.head);
    for (int i = static_cast<int>(threadIdx.x); i < work.heads * kDim; i += kThreads) {
      float value = 0;
      for (int w = 0; w < kWarps; ++w) value += warp_out[w][i / kDim][i % kDim];
      target[i] = value;
    }
    if (static_cast<int>(threadIdx.x) < work.heads) {
      float shift;
      const float total = total_of(static_cast<int>(threadIdx.x), shift);
      partial_lse(call, work.chunk + row, work.head)[threadIdx.x] = (shift + log2f(total)) * kLn2;
    }
    __syncthreads();
  });
}

// ---- float: ordinary arithmetic
//
// The block takes 32 entries at a time. Their keys go through shared memory, so that a lane has an
// entry and adds up its products alone; a warp has two of the heads. For values a thread has four
// features of all heads and every kParts-th entry.

template <int kDim>
__global__ void __launch_bounds__(kThreads, 3) attend_floats(SparseAttention call) {
  constexpr int kHeads = 8;
  constexpr int kTile = kWarp;
  constexpr int kVectors = kDim / 4;
  constexpr int kParts = kThreads / kVectors;
  union Tile {
    float4 keys[kTile][kVectors + 1];  // one more, so that the lanes read from different banks
    float4 out[kParts][kHeads][kVectors];
  };
  SWARM_KV_SHARED(tile, Tile);
  SWARM_KV_SHARED(query, float4[kHeads][kVectors]);
  SWARM_KV_SHARED(weight, float[kHeads][kTile]);
  SWARM_KV_SHARED(rescale, float[kHeads]);
  SWARM_KV_SHARED(slots, int64_t[kTile]);

  const Work work = work_of<kHeads>(call);
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kWarp;
  const int lane = thread % kWarp;
  const int part = thread / kVectors;
  const int feature = thread % kVectors * 4;
  const float* keys = static_cast<const float*>(call.pool) + work.kv_head * kDim;
  const float* values = keys + call.kv_heads * kDim;

  for_each_row(call, work.chunk, [&](int64_t row, int64_t first, int64_t last) {
    const float* queries =
        static_cast<const float*>(call.q) + (row * call.query_heads + work.head) * kDim;
    for (int i = thread; i < kHeads * kVectors; i += kThreads) {
      query[i / kVectors][i % kVectors] =
          i / kVectors < work.heads ? load<float4>(queries + 4 * i) : make_float4(0, 0, 0, 0);
    }
    float max[2] = {-INFINITY, -INFINITY};  // of heads warp and warp + kWarps
    float sum[2] = {};                      // over this lane's entries alone
    float4 out[kHeads];
    for (int h = 0; h < kHeads; ++h) out[h] = make_float4(0, 0, 0, 0);

    for (int64_t begin = first; begin < last; begin += kTile) {
      if (warp == 0) slots[lane] = slot_at<float>(call, begin + lane, last);
      __syncthreads();
      float4 loaded[kTile * kVectors / kThreads];
      for (int i = 0; i < kTile * kVectors / kThreads; ++i) {
        loaded[i] = load<float4>(keys + readable(slots[part + i * kParts]) + feature);
      }
      for (int i = 0; i < kTile * kVectors / kThreads; ++i) {
        tile.keys[part + i * kParts][feature / 4] = loaded[i];
      }
      __syncthreads();
      for (int i = 0; i < 2; ++i) {
        const int head = warp + i * kWarps;
        float product = 0;
        for (int d = 0; d < kVectors; ++d) {
          const float4 a = query[head][d], b = tile.keys[lane][d];
          product += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
        }
        const float score = begin + lane >= last ? -INFINITY
                            : slots[lane] < 0    ? NAN
                                                 : to_base2(call, product);
        float top = fmaxf(max[i], score);
        for (int bit = kWarp / 2; bit > 0; bit /= 2) {
          top = fmaxf(top, __shfl_xor_sync(kAll, top, bit));
        }
        const float shift = finite(top);
        const float scaled = exp2f(max[i] - shift);
        max[i] = top;
        const float own = exp2f(score - shift);
        sum[i] = sum[i] * scaled + own;
        weight[head][lane] = own;
        if (lane == 0) rescale[head] = scaled;
      }
      __syncthreads();
      for (int h = 0; h < kHeads; ++h) {
        out[h].x *= rescale[h];
        out[h].y *= rescale[h];
        out[h].z *= rescale[h];
        out[h].w *= rescale[h];
      }
      for (int i = 0; i < kTile / kParts; ++i) {
        const int entry = part + i * kParts;
        const float4 value = load<float4>(values + readable(slots[entry]) + feature);
        for (int h = 0; h < kHeads; ++h) {
          out[h].x += weight[h][entry] * value.x;
          out[h].y += weight[h][entry] * value.y;
          out[h].z += weight[h][entry] * value.z;
          out[h].w += weight[h][entry] * value.w;
        }
      }
      __syncthreads();
    }

    for (int i = 0; i < 2; ++i) {
      const int head = warp + i * kWarps;
      for (int bit = kWarp / 2; bit > 0; bit /= 2) sum[i] += __shfl_xor_sync(kAll, sum[i], bit);
      if (lane != 0) continue;
      rescale[head] = inverse_of(sum[i]);
      if (head < work.heads) {
        *partial_lse(call, work.chunk + row, work.head + head) =
            (finite(max[i]) + log2f(sum[i])) * kLn2;
      }
    }
    for (int h = 0; h < kHeads; ++h) tile.out[part][h][feature / 4] = out[h];
    __syncthreads();
    float* target = partial_out(call, work.chunk + row, work.head);
    for (int i = thread; i < work.heads * kVectors; i += kThreads) {
      const int head = i / kVectors;
      float4 value = make_float4(0, 0, 0, 0);
      for (int p = 0; p < kParts; ++p) {
        const float4 one = tile.out[p][head][i % kVectors];
        value.x += rescale[head] * one.x;
        value.y += rescale[head] * one.y;
        value.z += rescale[head] * one.z;
        value.w += rescale[head] * one.w;
      }
      store(target + 4 * i, value);
    }
  });
}

// ---- the second pass: a warp joins the partial results of one row and head, and the sink

__device__ int64_t within(int64_t offset, int64_t total) {
  return offset < 0 ? 0 : offset < total ? offset : total;
}

template <int kDim>
__global__ void __launch_bounds__(kThreads) join_chunks(SparseAttention call) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (index >= call.rows * call.query_heads) return;
  const int64_t row = index / call.query_heads;
  const int64_t head = index % call.query_heads;
  const int64_t begin = within(call.row_offsets[row], call.total);
  const int64_t end = within(call.row_offsets[row + 1], call.total);
  const int64_t first = begin / call.chunk + row;
  const int64_t last = begin < end ? (end - 1) / call.chunk + row + 1 : first;
  const float sink = call.sinks == nullptr ? -INFINITY : call.sinks[head];

  float top = sink;
  for (int64_t i = first + lane; i < last; i += kWarp) {
    top = fmaxf(top, *partial_lse(call, i, head));
  }
  for (int bit = kWarp / 2; bit > 0; bit /= 2) {
    top = fmaxf(top, __shfl_xor_sync(kAll, top, bit));
  }
  const float shift = finite(top);
  float sum = lane == 0 ? expf(sink - shift) : 0.0f;
  for (int64_t i = first + lane; i < last; i += kWarp) {
    sum += expf(*partial_lse(call, i, head) - shift);
  }
  for (int bit = kWarp / 2; bit > 0; bit /= 2) sum += __shfl_xor_sync(kAll, sum, bit);

  const float inverse = inverse_of(sum);
  float out[kDim / kWarp] = {};
  for (int64_t i = first; i < last; ++i) {
    const float weight = inverse * expf(*partial_lse(call, i, head) - shift);
    const float* source = partial_out(call, i, head);
    for (int d = 0; d < kDim / kWarp; ++d) out[d] += weight * source[lane + d * kWarp];
  }
  for (int d = 0; d < kDim / kWarp; ++d) call.out[index * kDim + lane + d * kWarp] = out[d];
  if (lane == 0) call.lse[index] = shift + logf(sum);
}

// ---- launches

template <typename Kernel>
cudaError_t attend(Kernel kernel, int heads, const SparseAttention& call, cudaStream_t stream) {
  const int64_t blocks =
      turns_of(call) * chunks_per_turn(call) * call.kv_heads * head_tiles(call, heads);
  return launch(kernel, static_cast<unsigned>(blocks), kThreads, 0, stream, call);
}

template <typename T, int kDim>
cudaError_t attend_in(const SparseAttention& call, cudaStream_t stream) {
  if constexpr (std::is_same_v<T, float>) {
    return attend(attend_floats<kDim>, 8, call, stream);
  } else {
    // Two octets of wide heads would not fit into registers.
    if constexpr (kDim < 256) {
      if (call.query_heads / call.kv_heads > 8) {
        return attend(attend_halves<T, kDim, 2>, 16, call, stream);
      }
    }
    return attend(attend_halves<T, kDim, 1>, 8, call, stream);
  }
}

template <int kDim>
cudaError_t run(const SparseAttention& call, cudaStream_t stream) {
  if (call.rows == 0) return cudaSuccess;
  if (call.total > 0) {
    const cudaError_t error =
        call.element == Element::kFloat16    ? attend_in<Half, kDim>(call, stream)
        : call.element == Element::kBFloat16 ? attend_in<BFloat16, kDim>(call, stream)
                                             : attend_in<float, kDim>(call, stream);
    if (error != cudaSuccess) return error;
  }
  const int64_t blocks = (call.rows * call.query_heads + kWarps - 1) / kWarps;
  return launch(join_chunks<kDim>, static_cast<unsigned>(blocks), kThreads, 0, stream, call);
}

}  // namespace

int64_t suitable_chunk(const SparseAttention& call, int64_t multiprocessors) {
  // Shorter ones take longer to begin and to join than to read.
  constexpr int64_t kShortest = 128;
  constexpr int64_t kStep = 16 * kWarps;
  // As many blocks as run at once: none waits for another to end.
  const int64_t blocks = blocks_of(static_cast<int>(call.dim)) * multiprocessors;
  const int64_t share = call.total * call.kv_heads * head_tiles(call, 8) / blocks + 1;
  const int64_t chunk = (share + kStep - 1) / kStep * kStep;
  return chunk < kShortest ? kShortest : chunk;
}

int64_t scratch_size(const SparseAttention& call) {
  return (chunks_of(call) + call.rows) * call.query_heads * (call.dim + 1);
}

bool is_head_size(int64_t dim) { return dim == 64 || dim == 128 || dim == 256; }

cudaError_t sparse_attention(const SparseAttention& call, cudaStream_t stream) {
  switch (call.dim) {
    case 64:
      return run<64>(call, stream);
    case 128:
      return run<128>(call, stream);
    case 256:
      return run<256>(call, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace swarm_kv::cuda
