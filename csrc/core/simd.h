#pragma once

#include <cstdint>
#include <cstdlib>  // __GLIBC__
#include <type_traits>
#include <utility>

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

// Defines `name`, which returns name_by<kBytes>(arguments), once per x86-64 level as
// SWARM_KV_CLONES does, each with its own width. Such overloads are told apart in one file only.
#ifdef SWARM_KV_HAS_CLONES
#define SWARM_KV_WIDTHS(result, name, parameters, arguments)         \
  __attribute__((target("arch=x86-64-v4"))) result name parameters { \
    return name##_by<64> arguments;                                  \
  }                                                                  \
  __attribute__((target("arch=x86-64-v3"))) result name parameters { \
    return name##_by<32> arguments;                                  \
  }                                                                  \
  __attribute__((target("default"))) result name parameters { return name##_by<16> arguments; }
#else
#define SWARM_KV_WIDTHS(result, name, parameters, arguments) \
  result name parameters { return name##_by<16> arguments; }
#endif

// Where a kernel may be written in intrinsics for an x86-64 level and chosen at run time.
#if defined(__GNUC__) && (defined(__clang__) || __GNUC__ >= 12) && defined(__x86_64__)
#define SWARM_KV_HAS_X86
#endif

// for (int lane = 0; lane < count; ++lane), to be vectorised: GCC would unroll so short a loop
// first, and then make worse code of it.
#if defined(__GNUC__) && !defined(__clang__)
#define SWARM_KV_LANES(lane, count) \
  _Pragma("GCC unroll 1") for (int lane = 0; lane < (count); ++lane)
#else
#define SWARM_KV_LANES(lane, count) for (int lane = 0; lane < (count); ++lane)
#endif

#define SWARM_KV_INLINE inline __attribute__((always_inline))

namespace swarm_kv {

// body(0), body(1), .. with numbers that the compiler knows: it keeps an array that is only indexed
// by such in registers, which it does not do for the index of a loop.
template <typename Body, int... kNumber>
SWARM_KV_INLINE void repeat(const Body& body, std::integer_sequence<int, kNumber...>) {
  (body(std::integral_constant<int, kNumber>()), ...);
}
template <int kTimes, typename Body>
SWARM_KV_INLINE void repeat(const Body& body) {
  repeat(body, std::make_integer_sequence<int, kTimes>());
}
#define SWARM_KV_BODY(number) [&](auto number) __attribute__((always_inline))

// result = e^x for x <= 0, relative error below 2e-7. Results under the smallest normal float are
// 0, so exp(-inf) = 0; NaN stays NaN. Written without branches so that loops over it vectorise. F
// is float or a vector of floats in GCC's notation, U the same of uint32_t.
template <typename F, typename U>
SWARM_KV_INLINE void exp_nonpositive(const F& x, F& result) {
  constexpr float kLowest = -87.33654f;  // log of the smallest normal float
  constexpr float kLog2e = 1.44269504f;
  constexpr float kLn2High = 0.693145752f;  // few enough bits that n * kLn2High is exact
  constexpr float kLn2Low = 1.42860677e-6f;
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer in the low bits
  const F lowest = F{} + kLowest;
  const F clamped = x < lowest ? lowest : x;
  const F shifted = clamped * kLog2e + kRound;
  const F n = shifted - kRound;
  const F r = (clamped - n * kLn2High) - n * kLn2Low;
  // Minimax fit of (e^r - 1 - r) / r^2 on |r| <= ln2 / 2.
  F p = 1.381459878757596e-3f * r + 8.368716575205326e-3f;
  p = p * r + 4.166838899254799e-2f;
  p = p * r + 1.666652113199234e-1f;
  p = p * r + 4.999999403953552e-1f;
  p = p * (r * r) + r + 1.0f;
  const U exponent = (__builtin_bit_cast(U, shifted) + 127u) << 23;
  p *= __builtin_bit_cast(F, exponent);
  result = x < lowest ? F{} : p;
}

SWARM_KV_INLINE float fast_expf(float x) {
  float result;
  exp_nonpositive<float, uint32_t>(x, result);
  return result;
}

}  // namespace swarm_kv
