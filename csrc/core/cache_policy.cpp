#include "core/cache_policy.h"

#include "core/arc_policy.h"
#include "core/counter_policy.h"
#include "core/keyed_policy.h"
#include "core/registry.h"

namespace swarm_kv {
namespace {

// The last step that activated an entry.
class LeastRecentlyUsed : public KeyedPolicy<int32_t> {
 public:
  // Before every step, the more often activated the later.
  void prime(std::span<const int32_t> activations, int64_t queries) override {
    for (size_t entry = 0; entry < activations.size(); ++entry) {
      keys_[entry] = activations[entry] - static_cast<int32_t>(queries);
    }
  }

  void touch(std::span<const int32_t> entries) override {
    ++step_;
    for (const int32_t entry : entries) keys_[entry] = step_;
  }

 private:
  int32_t step_ = 0;
};

class LeastFrequentlyUsed : public KeyedPolicy<int32_t> {
 public:
  void prime(std::span<const int32_t> activations, int64_t) override {
    keys_.assign(activations.begin(), activations.end());
  }

  void touch(std::span<const int32_t> entries) override {
    for (const int32_t entry : entries) ++keys_[entry];
  }
};

class DecayedFrequency : public KeyedPolicy<float> {
 public:
  void prime(std::span<const int32_t> activations, int64_t queries) override {
    const float steady = increment_ / (1 - kDecay) / static_cast<float>(queries);
    for (size_t entry = 0; entry < activations.size(); ++entry) {
      keys_[entry] = steady * static_cast<float>(activations[entry]);
    }
  }

  // Instead of multiplying every key by kDecay, each step's increment grows by 1 / kDecay.
  void touch(std::span<const int32_t> entries) override {
    increment_ /= kDecay;
    if (increment_ > 1e18f) {
      divide_keys(increment_);
      increment_ = 1.0f;
    }
    for (const int32_t entry : entries) keys_[entry] += increment_;
  }

 private:
  static constexpr float kDecay = 0.85f;
  float increment_ = 1.0f;
};

const Registry<CachePolicy>& registry() {
  static const Registry<CachePolicy> kRegistry(
      "cache_policy", {
                          registered<CachePolicy, CounterPolicy>("swarm"),
                          registered<CachePolicy, DecayedFrequency>("decayed_frequency"),
                          registered<CachePolicy, LeastRecentlyUsed>("lru"),
                          registered<CachePolicy, LeastFrequentlyUsed>("lfu"),
                          registered<CachePolicy, ArcPolicy>("arc"),
                      });
  return kRegistry;
}

}  // namespace

std::unique_ptr<CachePolicy> make_cache_policy(const std::string& name) {
  return registry().make(name);
}

}  // namespace swarm_kv
