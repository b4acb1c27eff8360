#pragma once

#include <cstdint>

namespace swarm_kv {

// A bijection of 64 bits that looks random (splitmix64): value n of the sequence that `seed` starts
// is mix(seed + n * kMixStep).
inline constexpr uint64_t kMixStep = 0x9e3779b97f4a7c15;

constexpr uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace swarm_kv
