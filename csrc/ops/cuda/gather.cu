#include "ops/cuda/gather.h"

namespace swarm_kv::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int64_t kPiece = 4096;  // bytes that a warp copies

// The byte where an entry of `bytes` bytes begins, or -1 where it would reach outside.
__device__ int64_t place(int64_t offset, int64_t unit, int64_t size, int64_t bytes) {
  return offset < 0 || bytes > size || offset > (size - bytes) / unit ? -1 : offset * unit;
}

__device__ const unsigned char* source_of(const Entries& entries, int64_t i, int64_t bytes) {
  const int64_t from = place(entries.from[i], entries.unit, entries.source_size, bytes);
  return from < 0 ? nullptr : static_cast<const unsigned char*>(entries.source) + from;
}

__device__ unsigned char* target_of(const Entries& entries, int64_t i, int64_t bytes) {
  const int64_t to = entries.to == nullptr
                         ? place(i, bytes, entries.target_size, bytes)
                         : place(entries.to[i], entries.unit, entries.target_size, bytes);
  return to < 0 ? nullptr : static_cast<unsigned char*>(entries.target) + to;
}

__device__ void fill_with_ones(unsigned char* target, int64_t bytes, int thread, int threads) {
  for (int64_t i = thread; i < bytes; i += threads) target[i] = 0xff;
}

// Threads 0 .. threads copy together; addresses differ by a multiple of sizeof(Unit).
template <typename Unit>
__device__ void copy_in(unsigned char* target, const unsigned char* source, int64_t bytes,
                        int thread, int threads) {
  constexpr int64_t kUnit = sizeof(Unit);
  constexpr int kFlying = 4;  // loads of a thread that are under way at once
  const int64_t misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(target) % kUnit);
  const int64_t before = misaligned == 0 ? 0 : kUnit - misaligned;
  const int64_t head = before < bytes ? before : bytes;
  const int64_t units = (bytes - head) / kUnit;
  for (int64_t first = thread; first < units; first += kFlying * threads) {
    Unit flying[kFlying];
    for (int k = 0; k < kFlying; ++k) {
      const int64_t i = first + k * threads;
      if (i < units) flying[k] = load<Unit>(source + head + i * kUnit);
    }
    for (int k = 0; k < kFlying; ++k) {
      const int64_t i = first + k * threads;
      if (i < units) store(target + head + i * kUnit, flying[k]);
    }
  }
  // What is left at both ends, less than two units.
  const int64_t tail = head + units * kUnit;
  for (int64_t i = thread; i < head + bytes - tail; i += threads) {
    const int64_t at = i < head ? i : tail + i - head;
    target[at] = source[at];
  }
}

__device__ void copy_bytes(unsigned char* target, const unsigned char* source, int64_t bytes,
                           int thread, int threads) {
  const uintptr_t apart = reinterpret_cast<uintptr_t>(target) - reinterpret_cast<uintptr_t>(source);
  if (apart % 16 == 0) {
    copy_in<uint4>(target, source, bytes, thread, threads);
  } else if (apart % 4 == 0) {
    copy_in<unsigned>(target, source, bytes, thread, threads);
  } else if (apart % 2 == 0) {
    copy_in<unsigned short>(target, source, bytes, thread, threads);
  } else {
    copy_in<unsigned char>(target, source, bytes, thread, threads);
  }
}

__global__ void __launch_bounds__(kThreads) gather(Entries entries, int64_t bytes) {
  const int64_t pieces = (bytes + kPiece - 1) / kPiece;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (item >= entries.count * pieces) return;
  const int64_t i = item / pieces;
  const int64_t first = item % pieces * kPiece;
  const int64_t length = bytes - first < kPiece ? bytes - first : kPiece;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const unsigned char* source = source_of(entries, i, bytes);
  unsigned char* target = target_of(entries, i, bytes);
  if (target == nullptr) return;
  if (source == nullptr) return fill_with_ones(target + first, length, lane, kWarp);
  copy_bytes(target + first, source + first, length, lane, kWarp);
}

// ---- codes, as core/codec.cpp writes them

constexpr int64_t kGroup = 32;                   // numbers of kivi4 that share a scale
constexpr int64_t kGroupBytes = 4 + kGroup / 2;  // least value, step, numbers

__host__ __device__ int64_t groups_of(const Coding& coding) {  // of K or V
  return (coding.heads * coding.dim + kGroup - 1) / kGroup;
}

__device__ float half_at(const unsigned char* code) {
  return half_from_bits(static_cast<uint16_t>(code[0] | code[1] << 8));
}

// Numbers i .. i + kWidth of an entry, all in one head; kWidth divides 16.
template <int kWidth>
__device__ void decode_int8(const Coding& coding, const unsigned char* code, int64_t i,
                            float (&values)[kWidth]) {
  const unsigned char* row = code + i / coding.dim * (2 + coding.dim);
  const float step = half_at(row);
  for (int k = 0; k < kWidth; ++k) {
    values[k] = static_cast<float>(static_cast<int8_t>(row[2 + i % coding.dim + k])) * step;
  }
}

// The same, all in K or V.
template <int kWidth>
__device__ void decode_kivi4(const Coding& coding, const unsigned char* code, int64_t i,
                             float (&values)[kWidth]) {
  const int64_t half = coding.heads * coding.dim;
  const int64_t channel = i % half;
  const unsigned char* group =
      code + (i / half * groups_of(coding) + channel / kGroup) * kGroupBytes;
  const float low = half_at(group);
  const float step = half_at(group + 2);
  const int64_t within = channel % kGroup;
  const unsigned char* bytes = group + 4 + within % (kGroup / 2);
  for (int k = 0; k < kWidth; ++k) {
    const int level = within < kGroup / 2 ? bytes[k] & 0xf : bytes[k] >> 4;
    values[k] = low + step * static_cast<float>(level);
    if (i < half) {
      values[k] = values[k] * coding.channels[half + channel + k] + coding.channels[channel + k];
    }
  }
}

// Scales are rounded, so that what was stored at the end of float16's range may come back from
// beyond it.
template <typename T, int kWidth>
__device__ void keep_in_range(float (&values)[kWidth]) {
  if constexpr (std::is_same_v<T, Half>) {
    constexpr float kLargest = 65504.0f;
    for (float& value : values) {  // NaN stays what it is
      value = value > kLargest ? kLargest : value;
      value = value < -kLargest ? -kLargest : value;
    }
  }
}

template <typename T, int kWidth>
__device__ void decode_all(const Coding& coding, const unsigned char* code, T* target) {
  for (int64_t i = static_cast<int64_t>(threadIdx.x) * kWidth; i < 2 * coding.heads * coding.dim;
       i += kThreads * kWidth) {
    float values[kWidth];
    if (coding.code == Coding::Code::kInt8) {
      decode_int8<kWidth>(coding, code, i, values);
    } else {
      decode_kivi4<kWidth>(coding, code, i, values);
    }
    keep_in_range<T>(values);
    if constexpr (kWidth == 1) {
      target[i] = from_float<T>(values[0]);
    } else if constexpr (kWidth == 4) {
      store(target + i, make_float4(values[0], values[1], values[2], values[3]));
    } else {
      store(target + i, make_uint4(pack<T>(values[0], values[1]), pack<T>(values[2], values[3]),
                                   pack<T>(values[4], values[5]), pack<T>(values[6], values[7])));
    }
  }
}

// A block per entry: the code is read once, in order, into shared memory, where bytes are cheap.
template <typename T>
__global__ void __launch_bounds__(kThreads) decode(Entries entries, Coding coding, int64_t stored) {
  constexpr int kWidth = 16 / sizeof(T);
  SWARM_KV_DYNAMIC_SHARED(buffer);
  const int64_t size = 2 * coding.heads * coding.dim * static_cast<int64_t>(sizeof(T));
  const unsigned char* source = source_of(entries, blockIdx.x, stored);
  unsigned char* target = target_of(entries, blockIdx.x, size);
  if (target == nullptr) return;
  const int thread = static_cast<int>(threadIdx.x);
  if (source == nullptr) return fill_with_ones(target, size, thread, kThreads);
  unsigned char* code = buffer + reinterpret_cast<uintptr_t>(source) % 16;
  copy_bytes(code, source, stored, thread, kThreads);
  __syncthreads();
  if (reinterpret_cast<uintptr_t>(target) % 16 == 0 && coding.dim % kWidth == 0) {
    decode_all<T, kWidth>(coding, code, reinterpret_cast<T*>(target));
  } else {
    decode_all<T, 1>(coding, code, reinterpret_cast<T*>(target));
  }
}

}  // namespace

cudaError_t gather_entries(const Entries& entries, int64_t bytes, cudaStream_t stream) {
  const int64_t items = entries.count * ((bytes + kPiece - 1) / kPiece);
  if (items == 0) return cudaSuccess;
  return launch(gather, static_cast<unsigned>((items + kWarps - 1) / kWarps), kThreads, 0, stream,
                entries, bytes);
}

int64_t code_bytes(const Coding& coding) {
  return coding.code == Coding::Code::kInt8 ? 2 * coding.heads * (2 + coding.dim)
                                            : 2 * groups_of(coding) * kGroupBytes;
}

cudaError_t decode_entries(const Entries& entries, const Coding& coding, cudaStream_t stream) {
  if (entries.count == 0) return cudaSuccess;
  const int64_t stored = code_bytes(coding);
  if (stored > kMaxCodeBytes) return cudaErrorInvalidValue;
  const auto kernel = coding.element == Element::kFloat16    ? decode<Half>
                      : coding.element == Element::kBFloat16 ? decode<BFloat16>
                                                             : decode<float>;
  return launch(kernel, static_cast<unsigned>(entries.count), kThreads,
                static_cast<size_t>(stored) + 16, stream, entries, coding, stored);
}

}  // namespace swarm_kv::cuda
