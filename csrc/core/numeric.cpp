#include "core/numeric.h"

#include <algorithm>

#include "core/simd.h"

namespace swarm_kv {

SWARM_KV_CLONES void to_float(const fp16* source, float* destination, int64_t count) {
  for (int64_t i = 0; i < count; ++i) destination[i] = fp16::decode(source[i].bits);
}

SWARM_KV_CLONES void to_float(const bf16* source, float* destination, int64_t count) {
  for (int64_t i = 0; i < count; ++i) destination[i] = bf16::decode(source[i].bits);
}

void to_float(const float* source, float* destination, int64_t count) {
  std::copy_n(source, count, destination);
}

SWARM_KV_CLONES void to_float(const double* source, float* destination, int64_t count) {
  for (int64_t i = 0; i < count; ++i) destination[i] = static_cast<float>(source[i]);
}

SWARM_KV_CLONES bool all_finite(const float* values, int64_t count) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < count; ++i) {
    // All exponent bits set: the addition carries into the sign bit.
    const uint32_t magnitude = std::bit_cast<uint32_t>(values[i]) & 0x7fffffffu;
    bad |= magnitude + 0x00800000u;
  }
  return (bad & 0x80000000u) == 0;
}

}  // namespace swarm_kv
