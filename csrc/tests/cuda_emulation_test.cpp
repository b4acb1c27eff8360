// The emulation of CUDA finds the mistakes that it is there to find.
#include <gtest/gtest.h>

#include <cstdlib>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/cuda/cub.h"

namespace swarm_kv::cuda {
namespace {

constexpr unsigned kThreads = 128;
constexpr int kSeeds = 20;

// Text of the error that the launch throws, or "".
template <typename... Parameters, typename... Arguments>
std::string error_of(void (*kernel)(Parameters...), Arguments... arguments) {
  try {
    launch(kernel, 2, kThreads, 0, nullptr, arguments...);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

// Each block reverses its part, with or without the barrier.
template <bool kBarrier>
__global__ void reverse(const int* in, int* out) {
  SWARM_KV_SHARED(kept, int[kThreads]);
  const unsigned first = blockIdx.x * blockDim.x;
  kept[threadIdx.x] = in[first + threadIdx.x];
  if (kBarrier) __syncthreads();
  out[first + threadIdx.x] = kept[blockDim.x - 1 - threadIdx.x];
}

template <bool kBarrier>
int wrong_seeds() {
  std::vector<int> in(3 * kThreads), out(in.size());
  std::iota(in.begin(), in.end(), 0);
  int wrong = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    emulation::set_seed(seed);
    launch(reverse<kBarrier>, 3, kThreads, 0, nullptr, in.data(), out.data());
    bool right = true;
    for (int i = 0; i < static_cast<int>(out.size()); ++i) {
      const int block = i / static_cast<int>(kThreads) * static_cast<int>(kThreads);
      right = right && out[i] == 2 * block + static_cast<int>(kThreads) - 1 - i;
    }
    wrong += right ? 0 : 1;
  }
  return wrong;
}

TEST(CudaEmulation, ABarrierOrdersSharedMemory) { EXPECT_EQ(wrong_seeds<true>(), 0); }

#if defined(__SANITIZE_THREAD__)
TEST(CudaEmulationDeathTest, AMissingBarrierIsARace) {
  const auto run = [] {
    wrong_seeds<false>();
    std::exit(0);
  };
  EXPECT_EXIT(run(), testing::ExitedWithCode(66), "data race");
}
#else
TEST(CudaEmulation, AMissingBarrierShows) { EXPECT_GT(wrong_seeds<false>(), kSeeds / 2); }
#endif

__global__ void leave_before_barrier() {
  if (threadIdx.x % 2 == 0) return;
  __syncthreads();
}

__global__ void two_barriers() {
  if (threadIdx.x % 2 == 0) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void never_arrive() {
  if (threadIdx.x < 32) {
    __shfl_sync(0xffffffffu, 1, 0);
    if (threadIdx.x == 7) __shfl_sync(0xffffffffu, 1, 0);
  }
}

__global__ void different_masks() { __syncwarp(threadIdx.x % 32 == 0 ? 0xffffffffu : 0xfffffffeu); }

__global__ void absent_source() {
  if (threadIdx.x % 32 < 16) __shfl_sync(0xffffu, 1, 20);
}

__global__ void false_check(int limit) {
  __syncthreads();
  device_check(static_cast<int>(threadIdx.x) < limit, "thread out of range");
  __syncthreads();
}

TEST(CudaEmulation, WhatAGpuWouldHangOnIsAnError) {
  for (int seed = 0; seed < kSeeds; ++seed) {
    emulation::set_seed(seed);
    EXPECT_NE(error_of(leave_before_barrier).find("never come"), std::string::npos);
    EXPECT_NE(error_of(two_barriers).find("different barriers"), std::string::npos);
    EXPECT_NE(error_of(never_arrive).find("cuda_emulation_test.cpp"), std::string::npos);
    EXPECT_NE(error_of(different_masks).find("different collectives"), std::string::npos);
    EXPECT_NE(error_of(absent_source).find("lane 20"), std::string::npos);
    EXPECT_NE(error_of(false_check, 100).find("thread out of range"), std::string::npos);
    // The next launch is not affected.
    EXPECT_EQ(error_of(false_check, 128), "");
  }
}

TEST(CudaEmulation, LaunchesOfPartsOfWarpsAreRefused) {
  EXPECT_THROW(launch(two_barriers, 1, 48, 0, nullptr), std::runtime_error);
  EXPECT_THROW(launch(two_barriers, 0, 32, 0, nullptr), std::runtime_error);
}

__global__ void collectives(int* wrong) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  constexpr unsigned kAll = 0xffffffffu;
  bool right = __shfl_sync(kAll, 10 * lane, 3) == 30;
  right = right && __shfl_sync(kAll, lane, 3, 8) == lane / 8 * 8 + 3;
  right = right && __shfl_xor_sync(kAll, static_cast<int64_t>(lane) << 40, 5) ==
                       static_cast<int64_t>(lane ^ 5) << 40;
  right = right && __shfl_down_sync(kAll, lane, 4) == (lane < 28 ? lane + 4 : lane);
  right = right && __shfl_up_sync(kAll, lane, 4, 16) == (lane % 16 < 4 ? lane : lane - 4);
  right = right && __ballot_sync(kAll, lane % 2) == 0xaaaaaaaau;
  right = right && __any_sync(kAll, lane == 9) && !__all_sync(kAll, lane == 9);
  right = right && __reduce_add_sync(kAll, lane) == 496 && __reduce_min_sync(kAll, -lane) == -31;
  // Both halves of the warp at once, at different places.
  int sum = lane;
  const unsigned half = lane < 16 ? 0xffffu : 0xffff0000u;
  for (int step = lane < 16 ? 8 : 1; step > 0 && step < 16;
       step = lane < 16 ? step / 2 : step * 2) {
    sum += __shfl_xor_sync(half, sum, step);
  }
  right = right && sum == (lane < 16 ? 120 : 376);
  if (!right) atomicAdd(wrong, 1);
}

TEST(CudaEmulation, LanesExchange) {
  for (int seed = 0; seed < kSeeds; ++seed) {
    emulation::set_seed(seed);
    int wrong = 0;
    launch(collectives, 2, kThreads, 0, nullptr, &wrong);
    EXPECT_EQ(wrong, 0);
  }
}

[[maybe_unused]] __global__ void count_in_two_steps(int* total) {
  const int seen = *total;
  emulation::yield();
  *total = seen + 1;
}

__global__ void count(int* total, float* sum) {
  atomicAdd(total, 1);
  atomicAdd(sum, 0.5f);
}

TEST(CudaEmulation, AtomicsLoseNothing) {
  int total = 0;
  float sum = 0;
  launch(count, dim3(2, 3), kThreads, 0, nullptr, &total, &sum);
  EXPECT_EQ(total, 6 * static_cast<int>(kThreads));
  EXPECT_EQ(sum, 3.0f * kThreads);
#if !defined(__SANITIZE_THREAD__)
  total = 0;
  emulation::set_seed(0);
  launch(count_in_two_steps, dim3(2, 3), kThreads, 0, nullptr, &total);
  EXPECT_LT(total, 6 * static_cast<int>(kThreads));
#endif
}

// Lane 0 of each warp hands on through shared memory what its lanes added.
template <bool kSync>
__global__ void warp_sums(const int* in, int* out) {
  SWARM_KV_SHARED(values, int[kThreads]);
  const unsigned lane = threadIdx.x % 32;
  values[threadIdx.x] = in[threadIdx.x];
  // The shuffle makes lanes wait for each other, but orders no memory.
  if (kSync) __syncwarp();
  if (!kSync) __shfl_sync(0xffffffffu, 0, 0);
  int sum = 0;
  for (unsigned i = 0; i < 32; ++i) sum += values[threadIdx.x - lane + i];
  if (lane == 0) out[threadIdx.x / 32] = sum;
}

TEST(CudaEmulationDeathTest, OnlyWarpBarriersOrderMemory) {
  std::vector<int> in(kThreads, 1), out(kThreads / 32);
  launch(warp_sums<true>, 1, kThreads, 0, nullptr, in.data(), out.data());
  EXPECT_EQ(out, std::vector<int>(kThreads / 32, 32));
#if defined(__SANITIZE_THREAD__)
  const auto run = [&] {
    launch(warp_sums<false>, 1, kThreads, 0, nullptr, in.data(), out.data());
    std::exit(0);
  };
  EXPECT_EXIT(run(), testing::ExitedWithCode(66), "data race");
#endif
}

__global__ void write_shared(unsigned at) {
  SWARM_KV_SHARED(values, unsigned char[96]);
  SWARM_KV_DYNAMIC_SHARED(dynamic);
  unsigned char* place = at < 1000 ? values : dynamic;
  if (threadIdx.x == 0) *const_cast<volatile unsigned char*>(place + at % 1000) = 1;
}

__global__ void read_shared(int* garbage) {
  SWARM_KV_SHARED(value, float);
  if (threadIdx.x == 0) *garbage += isnan(value) ? 1 : 0;
  __syncthreads();
  if (threadIdx.x == 0) value = 1;
}

TEST(CudaEmulationDeathTest, SharedMemoryHasBoundsAndNoPast) {
  launch(write_shared, 3, 32, 64, nullptr, 95u);
  launch(write_shared, 3, 32, 64, nullptr, 1063u);
#if defined(__SANITIZE_ADDRESS__)
  EXPECT_DEATH(launch(write_shared, 1, 32, 64, nullptr, 96u), "use-after-poison");
  EXPECT_DEATH(launch(write_shared, 1, 32, 64, nullptr, 1064u), "use-after-poison");
#endif
  EXPECT_THROW(launch(write_shared, 1, 32, 228 << 10, nullptr, 0u), std::runtime_error);
  int garbage = 0;
  launch(read_shared, 4, 32, 0, nullptr, &garbage);
  EXPECT_EQ(garbage, 4);
}

template <bool kBetween>
__global__ void cub_twins(const int* in, int* sum, int* before, int* sorted, int* origin) {
  using Reduce = cub::BlockReduce<int, kThreads>;
  using Scan = cub::BlockScan<int, kThreads>;
  using Sort = cub::BlockRadixSort<int, kThreads, 2, int>;
  union Storage {
    Reduce::TempStorage reduce;
    Scan::TempStorage scan;
    Sort::TempStorage sort;
    Storage() {}
  };
  SWARM_KV_SHARED(storage, Storage);
  const int own = in[2 * threadIdx.x] + in[2 * threadIdx.x + 1];
  const int all = Reduce(storage.reduce).Sum(own);
  if (threadIdx.x == 0) *sum = all;
  if (kBetween) __syncthreads();
  Scan(storage.scan).ExclusiveSum(own, before[threadIdx.x]);
  if (kBetween) __syncthreads();
  int keys[2] = {in[2 * threadIdx.x], in[2 * threadIdx.x + 1]};
  int values[2] = {static_cast<int>(2 * threadIdx.x), static_cast<int>(2 * threadIdx.x) + 1};
  Sort(storage.sort).SortDescending(keys, values);
  for (int i = 0; i < 2; ++i) {
    sorted[2 * threadIdx.x + i] = keys[i];
    origin[2 * threadIdx.x + i] = values[i];
  }
}

template <bool kBetween>
bool cub_is_right(uint64_t seed) {
  emulation::set_seed(seed);
  std::vector<int> in(2 * kThreads), before(kThreads), sorted(in.size()), origin(in.size());
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<int>(i * 37 % 101);
  int sum = 0;
  launch(cub_twins<kBetween>, 1, kThreads, 0, nullptr, in.data(), &sum, before.data(),
         sorted.data(), origin.data());
  bool right = sum == std::accumulate(in.begin(), in.end(), 0) && before[0] == 0;
  for (size_t i = 0; i < in.size(); ++i) {
    right = right && in[origin[i]] == sorted[i];
    if (i > 0) right = right && sorted[i - 1] >= sorted[i];
    if (i > 0 && sorted[i - 1] == sorted[i]) right = right && origin[i - 1] < origin[i];
  }
  for (unsigned t = 1; t < kThreads; ++t) {
    right = right && before[t] == before[t - 1] + in[2 * t - 2] + in[2 * t - 1];
  }
  return right;
}

TEST(CudaEmulation, CubTwins) {
  int wrong = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    EXPECT_TRUE(cub_is_right<true>(seed));
#if !defined(__SANITIZE_THREAD__)
    wrong += cub_is_right<false>(seed) ? 0 : 1;
#else
    ++wrong;
#endif
  }
  EXPECT_GT(wrong, 0);
}

}  // namespace
}  // namespace swarm_kv::cuda
