#pragma once

#include <cstdint>
#include <cstring>

#include "core/simd.h"

// 64-byte vectors in GCC's vector notation: one AVX-512 register, two AVX ones or four SSE ones, as
// the clone at hand has them.
namespace swarm_kv::cpu {

template <typename Acc>
struct Vec;

template <>
struct Vec<float> {
  typedef float type __attribute__((vector_size(64)));
  static constexpr int64_t kLanes = 16;
};

template <>
struct Vec<double> {
  typedef double type __attribute__((vector_size(64)));
  static constexpr int64_t kLanes = 8;
};

template <typename Acc>
SWARM_KV_INLINE void load(const Acc* source, typename Vec<Acc>::type& vector) {
  std::memcpy(&vector, source, sizeof(vector));
}

template <typename Acc>
SWARM_KV_INLINE void store(const typename Vec<Acc>::type& vector, Acc* destination) {
  std::memcpy(destination, &vector, sizeof(vector));
}

typedef uint32_t VecBits __attribute__((vector_size(64)));

// Sum of the lanes, by halves.
SWARM_KV_INLINE float sum_lanes(const Vec<float>::type& vector) {
  typedef float half_type __attribute__((vector_size(32)));
  typedef float quarter_type __attribute__((vector_size(16)));
  half_type half[2];
  std::memcpy(half, &vector, sizeof(vector));
  half[0] += half[1];
  quarter_type quarter[2];
  std::memcpy(quarter, &half[0], sizeof(half[0]));
  quarter[0] += quarter[1];
  return (quarter[0][0] + quarter[0][2]) + (quarter[0][1] + quarter[0][3]);
}

SWARM_KV_INLINE double sum_lanes(const Vec<double>::type& vector) {
  typedef double half_type __attribute__((vector_size(32)));
  typedef double quarter_type __attribute__((vector_size(16)));
  half_type half[2];
  std::memcpy(half, &vector, sizeof(vector));
  half[0] += half[1];
  quarter_type quarter[2];
  std::memcpy(quarter, &half[0], sizeof(half[0]));
  quarter[0] += quarter[1];
  return quarter[0][0] + quarter[0][1];
}

// The greatest of `first` and values[0 .. count); NaN is passed over. Written out because strict
// floating-point rules keep the compiler from vectorising the plain loop, here and in sum_of.
template <typename Acc>
SWARM_KV_INLINE Acc max_of(const Acc* values, int64_t count, Acc first) {
  using V = typename Vec<Acc>::type;
  constexpr int64_t kLanes = Vec<Acc>::kLanes;
  V lanes = first - V{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    V value;
    load(values + i, value);
    lanes = value > lanes ? value : lanes;
  }
  Acc result = first;
  for (; i < count; ++i) result = values[i] > result ? values[i] : result;
  for (int64_t lane = 0; lane < kLanes; ++lane)
    result = lanes[lane] > result ? lanes[lane] : result;
  return result;
}

template <typename Acc>
SWARM_KV_INLINE Acc sum_of(const Acc* values, int64_t count) {
  using V = typename Vec<Acc>::type;
  constexpr int64_t kLanes = Vec<Acc>::kLanes;
  V lanes = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    V value;
    load(values + i, value);
    lanes += value;
  }
  Acc result = sum_lanes(lanes);
  for (; i < count; ++i) result += values[i];
  return result;
}

// out[h] = scale * (queries[h] . key) for kHeads query rows `stride` apart; every element of the
// key is loaded once.
template <int kHeads, typename Acc>
SWARM_KV_INLINE void dot_rows(const Acc* queries, int64_t stride, const Acc* key, int64_t dim,
                              Acc scale, Acc* out, int64_t out_stride) {
  using V = typename Vec<Acc>::type;
  constexpr int64_t kLanes = Vec<Acc>::kLanes;
  V sums[kHeads] = {};
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    V k;
    load(key + d, k);
    for (int h = 0; h < kHeads; ++h) {
      V q;
      load(queries + h * stride + d, q);
      sums[h] += q * k;
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    Acc sum = sum_lanes(sums[h]);
    for (int64_t tail = d; tail < dim; ++tail) sum += queries[h * stride + tail] * key[tail];
    out[h * out_stride] = scale * sum;
  }
}

// dot_rows for any number of rows, four at a time.
template <typename Acc>
SWARM_KV_INLINE void dot_all(const Acc* queries, int64_t rows, int64_t stride, const Acc* key,
                             int64_t dim, Acc scale, Acc* out, int64_t out_stride) {
  for (; rows >= 4; rows -= 4) {
    dot_rows<4>(queries, stride, key, dim, scale, out, out_stride);
    queries += 4 * stride;
    out += 4 * out_stride;
  }
  switch (rows) {
    case 3:
      return dot_rows<3>(queries, stride, key, dim, scale, out, out_stride);
    case 2:
      return dot_rows<2>(queries, stride, key, dim, scale, out, out_stride);
    case 1:
      return dot_rows<1>(queries, stride, key, dim, scale, out, out_stride);
    default:
      return;
  }
}

}  // namespace swarm_kv::cpu
