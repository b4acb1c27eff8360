#include "core/numeric.h"

#include <algorithm>

#include "core/simd.h"

#ifdef SWARM_KV_HAS_X86
#include <immintrin.h>
#endif

namespace swarm_kv {
namespace {

#ifdef SWARM_KV_HAS_X86
// The processor's own conversions, which no compiler makes of fp16::decode and encode.
bool has_f16c() {
  static const bool has = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
  return has;
}

__attribute__((target("avx,f16c"))) int64_t to_float_f16c(const fp16* source, float* destination,
                                                          int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
    _mm256_storeu_ps(destination + i, _mm256_cvtph_ps(half));
  }
  return i;
}

__attribute__((target("avx,f16c"))) void to_float_rows_f16c(const fp16* source,
                                                            const int64_t* starts, int64_t rows,
                                                            float* destination, int64_t count) {
  for (int64_t r = 0; r < rows; ++r) {
    to_float_f16c(source + starts[r], destination + r * count, count);
  }
}

__attribute__((target("avx,f16c"))) int64_t from_float_f16c(const float* source, fp16* destination,
                                                            int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(destination + i), half);
  }
  return i;
}
#endif

}  // namespace

SWARM_KV_CLONES void to_float(const fp16* source, float* destination, int64_t count) {
  int64_t i = 0;
#ifdef SWARM_KV_HAS_X86
  if (has_f16c()) i = to_float_f16c(source, destination, count);
#endif
  for (; i < count; ++i) destination[i] = fp16::decode(source[i].bits);
}

SWARM_KV_CLONES void to_float(const bf16* source, float* destination, int64_t count) {
  for (int64_t i = 0; i < count; ++i) destination[i] = bf16::decode(source[i].bits);
}

void to_float_rows(const fp16* source, const int64_t* starts, int64_t rows, float* destination,
                   int64_t count) {
  int64_t done = 0;
#ifdef SWARM_KV_HAS_X86
  if (has_f16c()) {
    to_float_rows_f16c(source, starts, rows, destination, count);
    done = count / 8 * 8;
  }
#endif
  if (done == count) return;
  for (int64_t r = 0; r < rows; ++r) {
    to_float(source + starts[r] + done, destination + r * count + done, count - done);
  }
}

void to_float(const float* source, float* destination, int64_t count) {
  std::copy_n(source, count, destination);
}

SWARM_KV_CLONES void to_float(const double* source, float* destination, int64_t count) {
  for (int64_t i = 0; i < count; ++i) destination[i] = static_cast<float>(source[i]);
}

SWARM_KV_CLONES void from_float(const float* source, fp16* destination, int64_t count) {
  int64_t i = 0;
#ifdef SWARM_KV_HAS_X86
  if (has_f16c()) i = from_float_f16c(source, destination, count);
#endif
  for (; i < count; ++i) destination[i] = fp16(source[i]);
}

SWARM_KV_CLONES void from_float(const float* source, bf16* destination, int64_t count) {
  for (int64_t i = 0; i < count; ++i) destination[i] = bf16(source[i]);
}

void from_float(const float* source, float* destination, int64_t count) {
  std::copy_n(source, count, destination);
}

SWARM_KV_CLONES void from_float(const float* source, double* destination, int64_t count) {
  for (int64_t i = 0; i < count; ++i) destination[i] = source[i];
}

SWARM_KV_CLONES float largest_magnitude(const float* values, int64_t count) {
  // Magnitudes order as their bit patterns do, with infinity and then NaN on top.
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, std::bit_cast<int32_t>(values[i]) & 0x7fffffff);
  }
  return std::bit_cast<float>(largest);
}

}  // namespace swarm_kv
