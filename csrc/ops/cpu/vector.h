#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "core/simd.h"

// Vectors in GCC's notation, kBytes wide: as wide as the registers of the level at hand. GCC takes
// wider ones apart into scalars, not into registers.
namespace swarm_kv::cpu {

template <typename Acc, int kBytes>
struct Vec {
  typedef Acc type __attribute__((vector_size(kBytes)));
  typedef uint32_t bits __attribute__((vector_size(kBytes)));
  static constexpr int64_t kLanes = kBytes / sizeof(Acc);
};

template <typename V, typename Acc>
SWARM_KV_INLINE void load(const Acc* source, V& vector) {
  std::memcpy(&vector, source, sizeof(vector));
}

template <typename V, typename Acc>
SWARM_KV_INLINE void store(const V& vector, Acc* destination) {
  std::memcpy(destination, &vector, sizeof(vector));
}

// result = its lower half plus its upper half.
template <typename V, typename Half, std::size_t... kLane>
SWARM_KV_INLINE void add_halves(const V& vector, Half& result, std::index_sequence<kLane...>) {
  result = __builtin_shufflevector(vector, vector, kLane...) +
           __builtin_shufflevector(vector, vector, (kLane + sizeof...(kLane))...);
}

// Sum of the lanes, by halves.
template <int kBytes, typename Acc>
SWARM_KV_INLINE Acc sum_lanes(const typename Vec<Acc, kBytes>::type& vector) {
  if constexpr (kBytes > 16) {
    typename Vec<Acc, kBytes / 2>::type half;
    add_halves(vector, half, std::make_index_sequence<Vec<Acc, kBytes / 2>::kLanes>());
    return sum_lanes<kBytes / 2, Acc>(half);
  } else if constexpr (sizeof(Acc) == 4) {
    return (vector[0] + vector[2]) + (vector[1] + vector[3]);
  } else {
    return vector[0] + vector[1];
  }
}

// The lanes of a vector summed into 16 bytes, by halves.
template <int kBytes, typename Acc>
SWARM_KV_INLINE void sum_to_quarter(const typename Vec<Acc, kBytes>::type& vector,
                                    typename Vec<Acc, 16>::type& result) {
  if constexpr (kBytes == 16) {
    result = vector;
  } else {
    typename Vec<Acc, kBytes / 2>::type half;
    add_halves(vector, half, std::make_index_sequence<Vec<Acc, kBytes / 2>::kLanes>());
    sum_to_quarter<kBytes / 2, Acc>(half, result);
  }
}

// sums[i] = scale * the sum of the lanes of the i-th of four vectors, as sum_lanes has it.
template <int kBytes, typename Acc, typename V = typename Vec<Acc, kBytes>::type>
SWARM_KV_INLINE void sum_lanes_of_four(const V& a, const V& b, const V& c, const V& d, Acc scale,
                                       Acc* sums) {
  if constexpr (sizeof(Acc) == 4) {
    typename Vec<Acc, 16>::type qa, qb, qc, qd;
    sum_to_quarter<kBytes, Acc>(a, qa);
    sum_to_quarter<kBytes, Acc>(b, qb);
    sum_to_quarter<kBytes, Acc>(c, qc);
    sum_to_quarter<kBytes, Acc>(d, qd);
    const auto first =
        __builtin_shufflevector(qa, qb, 0, 4, 1, 5) + __builtin_shufflevector(qa, qb, 2, 6, 3, 7);
    const auto second =
        __builtin_shufflevector(qc, qd, 0, 4, 1, 5) + __builtin_shufflevector(qc, qd, 2, 6, 3, 7);
    store(scale * (__builtin_shufflevector(first, second, 0, 1, 4, 5) +
                   __builtin_shufflevector(first, second, 2, 3, 6, 7)),
          sums);
  } else {
    sums[0] = scale * sum_lanes<kBytes, Acc>(a);
    sums[1] = scale * sum_lanes<kBytes, Acc>(b);
    sums[2] = scale * sum_lanes<kBytes, Acc>(c);
    sums[3] = scale * sum_lanes<kBytes, Acc>(d);
  }
}

// The greatest of `first` and values[0 .. count); NaN is passed over. Written out because strict
// floating-point rules keep the compiler from vectorising the plain loop, here and in sum_of.
template <int kBytes, typename Acc>
SWARM_KV_INLINE Acc max_of(const Acc* values, int64_t count, Acc first) {
  using V = typename Vec<Acc, kBytes>::type;
  constexpr int64_t kLanes = Vec<Acc, kBytes>::kLanes;
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

template <int kBytes, typename Acc>
SWARM_KV_INLINE Acc sum_of(const Acc* values, int64_t count) {
  using V = typename Vec<Acc, kBytes>::type;
  constexpr int64_t kLanes = Vec<Acc, kBytes>::kLanes;
  V lanes = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    V value;
    load(values + i, value);
    lanes += value;
  }
  Acc result = sum_lanes<kBytes, Acc>(lanes);
  for (; i < count; ++i) result += values[i];
  return result;
}

// out[i] = exp(values[i] - shift), all at most 1; `out` may be `values`.
template <int kBytes>
SWARM_KV_INLINE void exp_below(const float* values, int64_t count, float shift, float* out) {
  using V = typename Vec<float, kBytes>::type;
  constexpr int64_t kLanes = Vec<float, kBytes>::kLanes;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    V value;
    load(values + i, value);
    exp_nonpositive<V, typename Vec<float, kBytes>::bits>(value - shift, value);
    store(value, out + i);
  }
  for (; i < count; ++i) out[i] = fast_expf(values[i] - shift);
}

template <int kBytes>
SWARM_KV_INLINE void exp_below(const double* values, int64_t count, double shift, double* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = std::exp(values[i] - shift);
}

// out[r * out_stride + n] = scale * (query row r . keys[n]), for kRows rows `stride` apart and
// kKeys keys, 1 or 4; every element is loaded once.
template <int kBytes, int kRows, int kKeys, typename Acc>
SWARM_KV_INLINE void dot_tile(const Acc* queries, int64_t stride, const Acc* const* keys,
                              int64_t dim, Acc scale, Acc* out, int64_t out_stride) {
  using V = typename Vec<Acc, kBytes>::type;
  constexpr int64_t kLanes = Vec<Acc, kBytes>::kLanes;
  V sums[kRows * kKeys];
  repeat<kRows * kKeys>(SWARM_KV_BODY(i) { sums[i] = V{}; });
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    V query[kRows];
    repeat<kRows>(SWARM_KV_BODY(r) { load(queries + r * stride + d, query[r]); });
    repeat<kKeys>(SWARM_KV_BODY(n) {
      V key;
      load(keys[n] + d, key);
      repeat<kRows>(SWARM_KV_BODY(r) { sums[r * kKeys + n] += query[r] * key; });
    });
  }
  repeat<kRows>(SWARM_KV_BODY(r) {
    Acc* row = out + r * out_stride;
    constexpr int kFirst = r * kKeys;
    if constexpr (kKeys == 4) {
      sum_lanes_of_four<kBytes, Acc>(sums[kFirst], sums[kFirst + 1], sums[kFirst + 2],
                                     sums[kFirst + 3], scale, row);
    } else {
      row[0] = scale * sum_lanes<kBytes, Acc>(sums[kFirst]);
    }
    for (int64_t tail = d; tail < dim; ++tail) {
      for (int n = 0; n < kKeys; ++n) row[n] += scale * queries[r * stride + tail] * keys[n][tail];
    }
  });
}

template <int kBytes, int kRows, typename Acc>
SWARM_KV_INLINE void dot_rows(const Acc* queries, int64_t stride, const Acc* const* keys,
                              int64_t count, int64_t dim, Acc scale, Acc* out, int64_t out_stride) {
  int64_t n = 0;
  for (; n + 4 <= count; n += 4) {
    dot_tile<kBytes, kRows, 4>(queries, stride, keys + n, dim, scale, out + n, out_stride);
  }
  for (; n < count; ++n) {
    dot_tile<kBytes, kRows, 1>(queries, stride, keys + n, dim, scale, out + n, out_stride);
  }
}

// dot_tile for any number of rows and keys: as many rows at a time as there are registers for.
template <int kBytes, typename Acc>
SWARM_KV_INLINE void dot_all(const Acc* queries, int64_t rows, int64_t stride,
                             const Acc* const* keys, int64_t count, int64_t dim, Acc scale,
                             Acc* out, int64_t out_stride) {
  constexpr int64_t kMost = kBytes == 64 ? 4 : 3;
  while (rows > 0) {
    const int64_t some = rows == 4 && kMost == 3 ? 2 : std::min(rows, kMost);
    if (some == 1) dot_rows<kBytes, 1>(queries, stride, keys, count, dim, scale, out, out_stride);
    if (some == 2) dot_rows<kBytes, 2>(queries, stride, keys, count, dim, scale, out, out_stride);
    if (some == 3) dot_rows<kBytes, 3>(queries, stride, keys, count, dim, scale, out, out_stride);
    if constexpr (kMost == 4) {
      if (some == 4) dot_rows<kBytes, 4>(queries, stride, keys, count, dim, scale, out, out_stride);
    }
    queries += some * stride;
    out += some * out_stride;
    rows -= some;
  }
}

}  // namespace swarm_kv::cpu
