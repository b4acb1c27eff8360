// Host twins of what kernels use of CUB, with its interface. As with CUB, shared storage may be
// used again only after a __syncthreads of the caller.
#pragma once

#include <algorithm>
#include <array>
#include <numeric>
#include <type_traits>
#include <utility>

#include "ops/cuda/emulation/emulation.h"

namespace cub {

struct NullType {};

// Blocks of one dimension. A thread publishes what it has; after a barrier it works out its result
// from all of it.
template <typename T, int kThreads>
class BlockReduce {
 public:
  struct TempStorage {
    T values[kThreads];
  };
  explicit BlockReduce(TempStorage& storage) : storage_(storage) {}

  // The result counts in thread 0; in others it is the thread's own value.
  template <typename Operator>
  T Reduce(T value, Operator combine) {
    storage_.values[threadIdx.x] = value;
    __syncthreads();
    if (threadIdx.x != 0) return value;
    T result = storage_.values[0];
    for (int i = 1; i < kThreads; ++i) result = combine(result, storage_.values[i]);
    return result;
  }
  T Sum(T value) {
    return Reduce(value, [](T a, T b) -> T { return a + b; });
  }

 private:
  TempStorage& storage_;
};

template <typename T, int kThreads>
class BlockScan {
 public:
  struct TempStorage {
    T values[kThreads];
  };
  explicit BlockScan(TempStorage& storage) : storage_(storage) {}

  void ExclusiveSum(T value, T& before) {
    T all;
    ExclusiveSum(value, before, all);
  }
  void ExclusiveSum(T value, T& before, T& all) {
    storage_.values[threadIdx.x] = value;
    __syncthreads();
    before = sum(threadIdx.x);
    all = sum(kThreads);
  }
  void InclusiveSum(T value, T& upto) {
    T all;
    InclusiveSum(value, upto, all);
  }
  void InclusiveSum(T value, T& upto, T& all) {
    ExclusiveSum(value, upto, all);
    upto += value;
  }

 private:
  T sum(unsigned count) const {
    return std::accumulate(storage_.values, storage_.values + count, T(0));
  }

  TempStorage& storage_;
};

// Stable; items are in blocked order: thread t holds kItems from t * kItems on.
template <typename Key, int kThreads, int kItems, typename Value = NullType>
class BlockRadixSort {
 public:
  struct TempStorage {
    std::pair<Key, Value> items[kThreads * kItems];
    // Trivial, as shared memory is.
    static_assert(std::is_arithmetic_v<Key>);
  };
  explicit BlockRadixSort(TempStorage& storage) : storage_(storage) {}

  void Sort(Key (&keys)[kItems]) { sort<false>(keys, nullptr); }
  void SortDescending(Key (&keys)[kItems]) { sort<true>(keys, nullptr); }
  void Sort(Key (&keys)[kItems], Value (&values)[kItems]) { sort<false>(keys, values); }
  void SortDescending(Key (&keys)[kItems], Value (&values)[kItems]) { sort<true>(keys, values); }

 private:
  template <bool kDescending>
  void sort(Key (&keys)[kItems], Value* values) {
    const int first = static_cast<int>(threadIdx.x) * kItems;
    for (int i = 0; i < kItems; ++i) {
      storage_.items[first + i] = {keys[i], values == nullptr ? Value{} : values[i]};
    }
    __syncthreads();
    std::array<std::pair<Key, Value>, kThreads * kItems> sorted;
    std::copy_n(storage_.items, sorted.size(), sorted.begin());
    std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
      return kDescending ? b.first < a.first : a.first < b.first;
    });
    for (int i = 0; i < kItems; ++i) {
      keys[i] = sorted[first + i].first;
      if (values != nullptr) values[i] = sorted[first + i].second;
    }
  }

  TempStorage& storage_;
};

}  // namespace cub
