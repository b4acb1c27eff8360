#pragma once

#include <bit>
#include <cstdint>
#include <cstdlib>  // __GLIBC__

// SWARM_KV_CLONES compiles a function once per x86-64 level and picks the widest at load time
// (needs ifunc: glibc). Sanitizers intercept before their runtime is ready for ifunc resolvers, so
// there the macro is empty. A cloned function must not be a template, and what it calls in its hot
// loops must be SWARM_KV_INLINE. GCC 12 vectorises most of these loops at -O3 only.
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 && defined(__x86_64__) && \
    defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define SWARM_KV_HAS_CLONES
#define SWARM_KV_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SWARM_KV_CLONES
#endif

#define SWARM_KV_INLINE inline __attribute__((always_inline))

namespace swarm_kv {

// e^x for x <= 0, relative error below 2e-7. Results under the smallest normal float are 0, so
// exp(-inf) = 0; NaN stays NaN. Written without branches so that loops over it vectorise.
SWARM_KV_INLINE float fast_expf(float x) {
  constexpr float kLowest = -87.33654f;  // log of the smallest normal float
  constexpr float kLog2e = 1.44269504f;
  constexpr float kLn2High = 0.693145752f;  // few enough bits that n * kLn2High is exact
  constexpr float kLn2Low = 1.42860677e-6f;
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer in the low bits
  const float clamped = x < kLowest ? kLowest : x;
  const float shifted = clamped * kLog2e + kRound;
  const float n = shifted - kRound;
  const float r = (clamped - n * kLn2High) - n * kLn2Low;
  // Minimax fit of (e^r - 1 - r) / r^2 on |r| <= ln2 / 2.
  float p = 1.381459878757596e-3f;
  p = p * r + 8.368716575205326e-3f;
  p = p * r + 4.166838899254799e-2f;
  p = p * r + 1.666652113199234e-1f;
  p = p * r + 4.999999403953552e-1f;
  p = p * (r * r) + r + 1.0f;
  const uint32_t exponent = (std::bit_cast<uint32_t>(shifted) + 127u) << 23;
  const float result = p * std::bit_cast<float>(exponent);
  return x < kLowest ? 0.0f : result;
}

}  // namespace swarm_kv
