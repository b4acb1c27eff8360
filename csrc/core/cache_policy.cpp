#include "core/cache_policy.h"

#include "core/registry.h"

namespace swarm_kv {
namespace {

class DecayedFrequency : public CachePolicy {
 public:
  // Instead of multiplying every heat by 0.9, each step's increment grows by 1/0.9.
  void touch(Residency& residency, std::span<const int32_t> entries) const override {
    residency.step /= 0.9f;
    if (residency.step > 1e18f) {
      for (float& heat : residency.heat) heat /= residency.step;
      residency.step = 1.0f;
    }
    for (const int32_t entry : entries) residency.heat[entry] += residency.step;
  }
};

class LeastRecentlyUsed : public CachePolicy {
 public:
  void touch(Residency& residency, std::span<const int32_t> entries) const override {
    residency.step += 1.0f;
    for (const int32_t entry : entries) residency.heat[entry] = residency.step;
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
