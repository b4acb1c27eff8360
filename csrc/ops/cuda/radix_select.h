#pragma once

#include <cstdint>

#include "ops/cuda/device.h"

// The greatest keys of a list without sorting it.
namespace swarm_kv::cuda {

// A key whose order is: higher value first, then lower index. Values are not NaN; -0 counts as 0.
// Never 0, which stands for what must not be taken.
__device__ inline unsigned long long ranking_key(float value, int64_t index) {
  const unsigned bits = __float_as_uint(value + 0.0f);
  const unsigned ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<unsigned long long>(ordered) << 32 | ~static_cast<unsigned>(index);
}

struct RadixSelectStorage {
  int counts[256];
  int bin;
  int above;  // keys in the bins above it
};

// Called by a block of kThreads threads: the least of the `count` greatest keys key_of(i), i < n,
// count >= 1. Keys of 0 do not count; 1 where `count` or fewer others are. These others are
// distinct. Reads the keys once per byte of them, until a byte settles it.
template <int kThreads, typename KeyOf>
__device__ unsigned long long radix_select(int64_t n, int64_t count, const KeyOf& key_of,
                                           RadixSelectStorage& storage) {
  constexpr int kWarp = 32, kBins = 256, kOwn = kBins / kWarp;
  unsigned long long prefix = 0;
  for (int shift = 56; shift >= 0; shift -= 8) {
    __syncthreads();  // the storage is done with
    for (int i = threadIdx.x; i < kBins; i += kThreads) storage.counts[i] = 0;
    if (threadIdx.x == 0) storage.bin = -1;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < n; i += kThreads) {
      const unsigned long long key = key_of(i);
      // Two shifts, since one by 64 is undefined.
      if (key != 0 && (key >> shift >> 8) == prefix) {
        atomicAdd(&storage.counts[key >> shift & 255], 1);
      }
    }
    __syncthreads();
    // The bin in which the last one taken lies. Lane 0 has the greatest bins.
    if (threadIdx.x < kWarp) {
      const int last = kBins - 1 - static_cast<int>(threadIdx.x) * kOwn;
      int own = 0;
      for (int i = 0; i < kOwn; ++i) own += storage.counts[last - i];
      int upto = own;
      for (int delta = 1; delta < kWarp; delta *= 2) {
        const int more = __shfl_up_sync(0xffffffffu, upto, delta);
        if (static_cast<int>(threadIdx.x) >= delta) upto += more;
      }
      if (upto - own < count && count <= upto) {
        int above = upto - own, bin = last;
        while (above + storage.counts[bin] < count) above += storage.counts[bin--];
        storage.bin = bin;
        storage.above = above;
      }
    }
    __syncthreads();
    if (storage.bin < 0) return 1;  // fewer than `count`, which only the first byte can show
    prefix = prefix << 8 | static_cast<unsigned>(storage.bin);
    count -= storage.above;
    if (storage.counts[storage.bin] == count) return max(prefix << shift, 1ull);
  }
  return prefix;
}

}  // namespace swarm_kv::cuda
