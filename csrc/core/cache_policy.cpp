#include "core/cache_policy.h"

#include "core/registry.h"

namespace swarm_kv {
namespace {

class DecayedFrequency : public CachePolicy {
 public:
  // Instead of multiplying every heat by kDecay, each step's increment grows by 1/kDecay.
  void touch(Residency& residency, std::span<const int32_t> entries) const override {
    residency.step /= kDecay;
    if (residency.step > 1e18f) {
      for (float& heat : residency.heat) heat /= residency.step;
      residency.step = 1.0f;
    }
    for (const int32_t entry : entries) residency.heat[entry] += residency.step;
  }

  void prime(Residency& residency, std::span<const int32_t> activations,
             int64_t queries) const override {
    const float steady = residency.step / (1 - kDecay) / static_cast<float>(queries);
    for (size_t entry = 0; entry < activations.size(); ++entry) {
      residency.heat[entry] = steady * static_cast<float>(activations[entry]);
    }
  }

 private:
  static constexpr float kDecay = 0.9f;
};

class LeastRecentlyUsed : public CachePolicy {
 public:
  void touch(Residency& residency, std::span<const int32_t> entries) const override {
    residency.step += 1.0f;
    for (const int32_t entry : entries) residency.heat[entry] = residency.step;
  }

  // Older than every step, the more often activated the younger.
  void prime(Residency& residency, std::span<const int32_t> activations,
             int64_t queries) const override {
    for (size_t entry = 0; entry < activations.size(); ++entry) {
      residency.heat[entry] =
          static_cast<float>(activations[entry]) / static_cast<float>(queries) * residency.step;
    }
  }
};

const Registry<CachePolicy>& registry() {
  static const Registry<CachePolicy> kRegistry(
      "cache_policy", {
                          registered<CachePolicy, DecayedFrequency>("decayed_frequency"),
                          registered<CachePolicy, LeastRecentlyUsed>("lru"),
                      });
  return kRegistry;
}

}  // namespace

std::unique_ptr<CachePolicy> make_cache_policy(const std::string& name) {
  return registry().make(name);
}

}  // namespace swarm_kv
