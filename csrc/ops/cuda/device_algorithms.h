#pragma once

#include "ops/cuda/device.h"

#if defined(SWARM_KV_EMULATION)
#include <algorithm>
#include <numeric>
#include <vector>
#else
#include <thrust/iterator/counting_iterator.h>

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#include <cub/device/device_select.cuh>
#endif

// Sorting and scanning of whole arrays by CUB; plain C++ where kernels are emulated. As in CUB,
// each sets `bytes` to the scratch memory that it needs and does no more where `scratch` is null.
// Counts are below 2^31.
namespace swarm_kv::cuda {

// Stable, greatest key first.
inline cudaError_t sort_descending(void* scratch, size_t& bytes, const uint32_t* keys,
                                   uint32_t* sorted_keys, const int32_t* values,
                                   int32_t* sorted_values, int64_t count, cudaStream_t stream) {
#if defined(SWARM_KV_EMULATION)
  static_cast<void>(stream);
  bytes = 1;
  if (scratch == nullptr) return cudaSuccess;
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return keys[a] > keys[b]; });
  for (int64_t i = 0; i < count; ++i) {
    sorted_keys[i] = keys[order[i]];
    sorted_values[i] = values[order[i]];
  }
  return cudaSuccess;
#else
  return cub::DeviceRadixSort::SortPairsDescending(scratch, bytes, keys, sorted_keys, values,
                                                   sorted_values, static_cast<int>(count), 0, 32,
                                                   stream);
#endif
}

inline cudaError_t inclusive_sum(void* scratch, size_t& bytes, const int32_t* values, int32_t* sums,
                                 int64_t count, cudaStream_t stream) {
#if defined(SWARM_KV_EMULATION)
  static_cast<void>(stream);
  bytes = 1;
  if (scratch != nullptr) std::partial_sum(values, values + count, sums);
  return cudaSuccess;
#else
  return cub::DeviceScan::InclusiveSum(scratch, bytes, values, sums, static_cast<int>(count),
                                       stream);
#endif
}

// The indices below `count` for which selected(index) is true, ascending, and how many they are.
template <typename Selected>
cudaError_t select_indices(void* scratch, size_t& bytes, int64_t count, const Selected& selected,
                           int64_t* indices, int64_t* found, cudaStream_t stream) {
#if defined(SWARM_KV_EMULATION)
  static_cast<void>(stream);
  bytes = 1;
  if (scratch == nullptr) return cudaSuccess;
  *found = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (selected(i)) indices[(*found)++] = i;
  }
  return cudaSuccess;
#else
  return cub::DeviceSelect::If(scratch, bytes, thrust::counting_iterator<int64_t>(0), indices,
                               found, static_cast<int>(count), selected, stream);
#endif
}

}  // namespace swarm_kv::cuda
