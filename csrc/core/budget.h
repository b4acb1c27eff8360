#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string_view>

namespace swarm_kv {

// What a byte of fast memory is held for.
enum class Use : int { kStaging, kWindow, kIndex, kCache };
inline constexpr int kUses = 4;
std::string_view name_of(Use use);

// The accountant of `dram_bytes`: every byte that a store keeps for KV is reserved here first.
//
// The cluster cache takes what nobody else needs, so a reservation for another use first asks it to
// yield; only when even an empty cache would not help does reserve() throw Error(kCapacity), before
// anything has changed. Not thread-safe: the store's lock protects it.
class Budget {
 public:
  explicit Budget(uint64_t limit_bytes) : limit_(limit_bytes) {}

  void reserve(Use use, uint64_t bytes);
  void release(Use use, uint64_t bytes) noexcept;

  // `yield(bytes)` must release at least `bytes` of Use::kCache.
  void set_yield(std::function<void(uint64_t)> yield) { yield_ = std::move(yield); }

  uint64_t limit() const { return limit_; }
  uint64_t used() const { return total_; }
  uint64_t used(Use use) const { return used_[static_cast<int>(use)]; }
  uint64_t peak() const { return peak_; }
  uint64_t free() const { return limit_ - total_; }

 private:
  uint64_t limit_;
  uint64_t total_ = 0;
  uint64_t peak_ = 0;
  std::array<uint64_t, kUses> used_{};
  std::function<void(uint64_t)> yield_;
};

}  // namespace swarm_kv
