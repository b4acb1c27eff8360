// What a kernel source may use; every .cu file includes this header and no
// other one of CUDA.
//
// nvcc compiles kernels for a GPU. The tests compile the same files as C++ with
// SWARM_KV_EMULATION, where emulation/emulation.h runs each thread of a block as a fiber, in random
// order. Both give:
//
//   threads     threadIdx, blockIdx, blockDim, gridDim (blocks of whole warps), __syncthreads,
//               __syncwarp, __threadfence; blocks may not wait for each other
//   warps       __shfl_sync, _xor_, _up_, _down_, __ballot_sync, __any_sync, __all_sync,
//               __reduce_{add,min,max,and,or}_sync; as on a GPU, only __syncwarp orders memory
//   atomics     atomicAdd, Sub, Min, Max, And, Or, Exch, CAS
//   arithmetic  <math.h> in float, __expf, __logf, __fdividef, rsqrtf, min, max, __popc(ll),
//               __clz(ll), __ffs(ll), __float_as_uint and its kin, __ldg
//   types       dim3, uint2, uint4 and their kin; Half and BFloat16, to_float, from_float,
//               half_from_bits
//   CUB         what ops/cuda/cub.h has, in files that include it
//   and below   SWARM_KV_SHARED, SWARM_KV_DYNAMIC_SHARED, load, store, pack, multiply_add,
//               device_check, launch
//
// Other CUDA names are added to both sides when they are needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(SWARM_KV_EMULATION)

#include "ops/cuda/emulation/emulation.h"

#else

#include <cuda_runtime_api.h>  // all that callers of kernels need

#if defined(__CUDACC__)

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// One variable in shared memory: SWARM_KV_SHARED(sums, float[32]) declares float sums[32].
#define SWARM_KV_SHARED(name, ...) __shared__::std::type_identity_t<__VA_ARGS__> name

// The dynamic shared memory of the launch as bytes, aligned to 16.
#define SWARM_KV_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

namespace swarm_kv::cuda {

using Half = __half;
using BFloat16 = __nv_bfloat16;

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(Half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(BFloat16 value) { return __bfloat162float(value); }

// To nearest even.
template <typename T>
__device__ __forceinline__ T from_float(float value) {
  if constexpr (std::is_same_v<T, Half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return value;
  }
}

// Up to 16 bytes at once, from an address that is a multiple of their number. The memory that load
// reads must not change while the kernel runs.
template <typename Vector>
__device__ __forceinline__ Vector load(const void* source) {
  return __ldg(static_cast<const Vector*>(source));
}
template <typename Vector>
__device__ __forceinline__ void store(void* target, Vector value) {
  *static_cast<Vector*>(target) = value;
}

__device__ __forceinline__ float half_from_bits(uint16_t bits) {
  return __half2float(__ushort_as_half(bits));
}

// Two numbers of Half or BFloat16 in a register, `low` in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t result;
  if constexpr (std::is_same_v<T, Half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  }
  return result;
}

// d += a b by the tensor cores, for Half or BFloat16: mma.m16n8k16 of PTX. With g = lane / 4 and
// t = lane % 4, a lane holds of the matrices
//   a [16, 16]  rows g, g + 8, g, g + 8; columns 2t and 2t + 1, in the last two 8 further
//   b [16, 8]   rows 2t and 2t + 1, then 8 further; column g
//   d [16, 8]   rows g, g, g + 8, g + 8; columns 2t, 2t + 1, 2t, 2t + 1
template <typename T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, Half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// Stops the kernel where `condition` does not hold. On a GPU only in builds with SWARM_KV_DEBUG,
// since what it checks was checked before the launch.
__device__ __forceinline__ void device_check(bool condition, const char* what) {
#if defined(SWARM_KV_DEBUG)
  if (!condition) {
    printf("swarm_kv: %s\n", what);
    __trap();
  }
#else
  static_cast<void>(condition);
  static_cast<void>(what);
#endif
}

// Enqueues `kernel` on `stream` and returns the launch's error. `threads` per block are whole
// warps; `shared` is the dynamic shared memory in bytes.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 blocks, unsigned threads, size_t shared,
                   cudaStream_t stream, Arguments... arguments) {
  constexpr size_t kAlways = 48 << 10;  // more must be asked for
  if (shared > kAlways) {
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error != cudaSuccess) cudaGetLastError();  // or the next one to ask would get it, too
  return error;
}

}  // namespace swarm_kv::cuda

#endif  // __CUDACC__
#endif  // SWARM_KV_EMULATION
