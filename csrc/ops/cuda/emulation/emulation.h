// CUDA's device side on the host, for tests: see ops/cuda/device.h for what there is.
//
// Blocks run one after another, in random order. The threads of a block are fibers; each runs until
// it waits (a barrier, a warp's collective, an atomic), then another one that can run is chosen at
// random, so that code which counts on an order gives wrong results for some seeds. Under
// ThreadSanitizer each thread of a block counts as one of its own that only barriers and warp
// barriers order, and a race is reported whatever the order was. Shared memory begins with garbage
// and ends in memory that AddressSanitizer refuses.
//
// A launch throws std::runtime_error where a GPU would hang or be undefined: threads that wait at
// different barriers or have left, collectives of lanes that do not agree, a false device_check.
// All launches come from one thread.
#pragma once

#include <math.h>
#include <strings.h>

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>
#include <type_traits>

#include "core/numeric.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

#define threadIdx (::swarm_kv::cuda::emulation::thread_index())
#define blockIdx (::swarm_kv::cuda::emulation::block_index())
#define blockDim (::swarm_kv::cuda::emulation::block_size())
#define gridDim (::swarm_kv::cuda::emulation::grid_size())

#define SWARM_KV_SHARED(name, ...) \
  auto& name = ::swarm_kv::cuda::emulation::shared<__VA_ARGS__>([] {})
#define SWARM_KV_DYNAMIC_SHARED(name) \
  unsigned char* const name = ::swarm_kv::cuda::emulation::dynamic_shared()

#define SWARM_KV_VECTOR(type, name, align)                         \
  struct alignas(2 * align) name##2 { type x, y; };                \
  struct name##3 { type x, y, z; };                                \
  struct alignas(4 * align) name##4 { type x, y, z, w; };          \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; } \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
SWARM_KV_VECTOR(float, float, 4)
SWARM_KV_VECTOR(int, int, 4)
SWARM_KV_VECTOR(unsigned, uint, 4)
SWARM_KV_VECTOR(unsigned short, ushort, 2)
SWARM_KV_VECTOR(unsigned char, uchar, 1)
SWARM_KV_VECTOR(signed char, char, 1)
#undef SWARM_KV_VECTOR

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned width = 1, unsigned height = 1, unsigned depth = 1)
      : x(width), y(height), z(depth) {}
};

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
using cudaStream_t = struct CUstream_st*;

namespace swarm_kv::cuda {

using Half = fp16;
using BFloat16 = bf16;

inline float to_float(float value) { return value; }
inline float to_float(Half value) { return value; }
inline float to_float(BFloat16 value) { return value; }

template <typename T>
T from_float(float value) {
  return T(value);
}

void device_check(bool condition, const char* what);

template <typename Vector>
Vector load(const void* source) {
  device_check(reinterpret_cast<uintptr_t>(source) % sizeof(Vector) == 0,
               "load from an unaligned address");
  Vector value;
  std::memcpy(&value, source, sizeof(Vector));
  return value;
}
template <typename Vector>
void store(void* target, Vector value) {
  device_check(reinterpret_cast<uintptr_t>(target) % sizeof(Vector) == 0,
               "store to an unaligned address");
  std::memcpy(target, &value, sizeof(Vector));
}

inline float half_from_bits(uint16_t bits) { return fp16::decode(bits); }

template <typename T>
uint32_t pack(float low, float high) {
  return T(low).bits | static_cast<uint32_t>(T(high).bits) << 16;
}

namespace emulation {

using Site = std::source_location;

// The order in which threads and blocks run, until it is set anew. Even seeds choose the next
// thread evenly; odd ones give each thread of a block a rank and always run the highest that can,
// which leaves some threads far behind.
void set_seed(uint64_t seed);

// Runs `kernel` once for each thread of each block.
void run(dim3 blocks, unsigned threads, size_t shared, const std::function<void()>& kernel);

const uint3& thread_index();
const uint3& block_index();
const dim3& block_size();
const dim3& grid_size();

// Lets other threads run.
void yield();

void barrier(const Site& site);

enum class Collective {
  kSync,
  kShuffle,
  kBallot,
  kAdd,
  kMinSigned,
  kMaxSigned,
  kMin,
  kMax,
  kAnd,
  kOr,
  kMultiplyHalf,
  kMultiplyBFloat16
};

// What this lane gets once every lane of `mask` has come: for kShuffle the value of lane `source`.
uint64_t collective(Collective kind, unsigned mask, uint64_t value, unsigned source,
                    const Site& site);

// What a lane brings to multiply_add.
struct Fragments {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
};

// The block's memory for `key`, the same for all its threads.
void* shared_memory(const void* key, size_t bytes, size_t alignment);
unsigned char* dynamic_shared();

template <typename T, typename Tag>
T& shared(Tag) {
  static const char key = 0;  // one for each declaration, since each lambda has its own type
  return *static_cast<T*>(shared_memory(&key, sizeof(T), alignof(T)));
}

template <typename T>
uint64_t to_word(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_trivially_copyable_v<T>);
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  return word;
}

template <typename T>
T from_word(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof(T));
  return value;
}

// `lane` is the source within the caller's group of `width` lanes; itself where it is outside.
template <typename T>
T shuffle(unsigned mask, T value, int lane, int width, const Site& site) {
  const int self = static_cast<int>(thread_index().x % 32);
  const int first = self / width * width;
  const int source = lane >= 0 && lane < width ? first + lane : self;
  return from_word<T>(
      collective(Collective::kShuffle, mask, to_word(value), static_cast<unsigned>(source), site));
}

template <typename T, typename Function>
T atomic(T* target, Function&& function) {
  yield();
  return function(std::atomic_ref<T>(*target));
}

// For operations that std::atomic_ref has not.
template <typename T, typename Function>
T atomic_update(T* target, Function&& function) {
  return atomic(target, [&](std::atomic_ref<T> value) {
    T old = value.load(std::memory_order_relaxed);
    while (!value.compare_exchange_weak(old, function(old), std::memory_order_relaxed)) {
    }
    return old;
  });
}

}  // namespace emulation

template <typename T>
void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                  const std::source_location& site = std::source_location::current()) {
  using namespace emulation;
  const Fragments fragments{d, a, b};
  collective(std::is_same_v<T, Half> ? Collective::kMultiplyHalf : Collective::kMultiplyBFloat16,
             0xffffffffu, to_word(&fragments), 0, site);
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 blocks, unsigned threads, size_t shared,
                   cudaStream_t, Arguments... arguments) {
  emulation::run(blocks, threads, shared, [&] { kernel(arguments...); });
  return cudaSuccess;
}

}  // namespace swarm_kv::cuda

inline void __syncthreads(const std::source_location& site = std::source_location::current()) {
  swarm_kv::cuda::emulation::barrier(site);
}

inline void __syncwarp(unsigned mask = 0xffffffffu,
                       const std::source_location& site = std::source_location::current()) {
  using namespace swarm_kv::cuda::emulation;
  collective(Collective::kSync, mask, 0, 0, site);
}

void __threadfence();
inline void __threadfence_block() { __threadfence(); }

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32,
              const std::source_location& site = std::source_location::current()) {
  return swarm_kv::cuda::emulation::shuffle(mask, value, lane & (width - 1), width, site);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32,
                  const std::source_location& site = std::source_location::current()) {
  const int lane = static_cast<int>(threadIdx.x) % width;
  return swarm_kv::cuda::emulation::shuffle(mask, value, lane ^ bits, width, site);
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 const std::source_location& site = std::source_location::current()) {
  const int lane = static_cast<int>(threadIdx.x) % width;
  return swarm_kv::cuda::emulation::shuffle(mask, value, lane - static_cast<int>(delta), width,
                                            site);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   const std::source_location& site = std::source_location::current()) {
  const int lane = static_cast<int>(threadIdx.x) % width;
  return swarm_kv::cuda::emulation::shuffle(mask, value, lane + static_cast<int>(delta), width,
                                            site);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              const std::source_location& site = std::source_location::current()) {
  using namespace swarm_kv::cuda::emulation;
  return static_cast<unsigned>(collective(Collective::kBallot, mask, predicate != 0, 0, site));
}

inline int __any_sync(unsigned mask, int predicate,
                      const std::source_location& site = std::source_location::current()) {
  return __ballot_sync(mask, predicate, site) != 0;
}

inline int __all_sync(unsigned mask, int predicate,
                      const std::source_location& site = std::source_location::current()) {
  return __ballot_sync(mask, predicate, site) == mask;
}

#define SWARM_KV_REDUCE(name, kind)                                                          \
  inline unsigned name(unsigned mask, unsigned value,                                        \
                       const std::source_location& site = std::source_location::current()) { \
    using namespace swarm_kv::cuda::emulation;                                               \
    return static_cast<unsigned>(collective(Collective::kind, mask, value, 0, site));        \
  }
#define SWARM_KV_REDUCE_SIGNED(name, kind)                                              \
  inline int name(unsigned mask, int value,                                             \
                  const std::source_location& site = std::source_location::current()) { \
    using namespace swarm_kv::cuda::emulation;                                          \
    return static_cast<int>(                                                            \
        collective(Collective::kind, mask, static_cast<unsigned>(value), 0, site));     \
  }
SWARM_KV_REDUCE(__reduce_add_sync, kAdd)
SWARM_KV_REDUCE(__reduce_min_sync, kMin)
SWARM_KV_REDUCE(__reduce_max_sync, kMax)
SWARM_KV_REDUCE(__reduce_and_sync, kAnd)
SWARM_KV_REDUCE(__reduce_or_sync, kOr)
SWARM_KV_REDUCE_SIGNED(__reduce_add_sync, kAdd)
SWARM_KV_REDUCE_SIGNED(__reduce_min_sync, kMinSigned)
SWARM_KV_REDUCE_SIGNED(__reduce_max_sync, kMaxSigned)
#undef SWARM_KV_REDUCE
#undef SWARM_KV_REDUCE_SIGNED

#define SWARM_KV_ATOMIC(name, expression)                                                    \
  template <typename T>                                                                      \
  T name(T* target, std::type_identity_t<T> value) {                                         \
    return swarm_kv::cuda::emulation::atomic_update(target,                                  \
                                                    [=](T old) -> T { return expression; }); \
  }
SWARM_KV_ATOMIC(atomicAdd, old + value)
SWARM_KV_ATOMIC(atomicSub, old - value)
SWARM_KV_ATOMIC(atomicMin, old < value ? old : value)
SWARM_KV_ATOMIC(atomicMax, old < value ? value : old)
SWARM_KV_ATOMIC(atomicAnd, old& value)
SWARM_KV_ATOMIC(atomicOr, old | value)
SWARM_KV_ATOMIC(atomicExch, (static_cast<void>(old), value))
#undef SWARM_KV_ATOMIC

template <typename T>
T atomicCAS(T* target, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return swarm_kv::cuda::emulation::atomic_update(
      target, [=](T old) -> T { return old == expected ? value : old; });
}

template <typename T>
T __ldg(const T* source) {
  return *source;
}

#define SWARM_KV_MIN_MAX(type)                              \
  inline type min(type a, type b) { return a < b ? a : b; } \
  inline type max(type a, type b) { return a < b ? b : a; }
SWARM_KV_MIN_MAX(int)
SWARM_KV_MIN_MAX(unsigned)
SWARM_KV_MIN_MAX(long)
SWARM_KV_MIN_MAX(unsigned long)
SWARM_KV_MIN_MAX(long long)
SWARM_KV_MIN_MAX(unsigned long long)
#undef SWARM_KV_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return ffs(x); }
inline int __ffsll(long long x) { return ffsll(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
// Byte i of the result is the byte of {x, y} that digit i of `selector` names.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return result;
}
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
