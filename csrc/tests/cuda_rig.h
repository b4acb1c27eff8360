#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

#include "ops/cuda/device.h"

// What the tests of CUDA kernels share.
namespace swarm_kv::cuda {

// Generated cases of one kernel. ThreadSanitizer finds a race whatever the order of threads was.
#if defined(__SANITIZE_THREAD__)
constexpr unsigned kCases = 40;
#else
constexpr unsigned kCases = 200;
#endif

// Scratch memory full of garbage (as floats, NaN), with nothing behind it.
class Scratch {
 public:
  explicit Scratch(size_t bytes)
      : memory_(std::aligned_alloc(256, (bytes + 255) / 256 * 256), &std::free) {
    std::memset(memory_.get(), 0xff, bytes);
  }
  void* get() const { return memory_.get(); }

 private:
  std::unique_ptr<void, void (*)(void*)> memory_;
};

// Shapes and values of one generated case; sets the order in which threads run, too.
class Generator {
 public:
  explicit Generator(unsigned seed) : random_(seed) { emulation::set_seed(seed); }

  int64_t integer(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
  template <typename T = int64_t>
  T one_of(std::initializer_list<std::type_identity_t<T>> values) {
    return values.begin()[integer(0, static_cast<int64_t>(values.size()) - 1)];
  }
  bool chance(double probability) { return std::bernoulli_distribution(probability)(random_); }

  template <typename T = float>
  std::vector<T> normal(int64_t count, float deviation = 1.0f) {
    std::normal_distribution<float> distribution(0.0f, deviation);
    std::vector<T> values(count);
    for (T& value : values) value = T(distribution(random_));
    return values;
  }
  std::vector<uint8_t> bytes(int64_t count, int greatest = 255) {
    std::vector<uint8_t> values(count);
    for (uint8_t& value : values) value = static_cast<uint8_t>(integer(0, greatest));
    return values;
  }

 private:
  std::mt19937 random_;
};

// The largest difference relative to the largest finite number of `expected`, at least 1. Infinity
// where one side has an infinity or NaN that the other has not.
template <typename T>
double difference(const std::vector<T>& actual, const std::vector<T>& expected) {
  if (actual.size() != expected.size()) return INFINITY;
  double largest = 1, result = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double a = actual[i], b = expected[i];
    if (std::isfinite(a) && std::isfinite(b)) {
      largest = std::max(largest, std::abs(b));
      result = std::max(result, std::abs(a - b));
    } else if (!(a == b || (std::isnan(a) && std::isnan(b)))) {
      return INFINITY;
    }
  }
  return result / largest;
}

}  // namespace swarm_kv::cuda
