#include "core/budget.h"

#include <algorithm>
#include <string>

#include "io/error.h"

namespace swarm_kv {

std::string_view name_of(Use use) {
  static constexpr std::array<std::string_view, kUses> kNames = {"staging", "window", "index",
                                                                 "cache"};
  return kNames[static_cast<int>(use)];
}

void Budget::reserve(Use use, uint64_t bytes) {
  if (bytes > limit_ - total_ && use != Use::kCache) {
    const uint64_t without_cache = total_ - used(Use::kCache);
    if (without_cache + bytes > limit_) {
      throw Error(
          ErrorKind::kCapacity,
          "`dram_bytes` (" + std::to_string(limit_) +
              ") is too small: " + std::string(name_of(use)) + " needs " + std::to_string(bytes) +
              " more bytes and " + std::to_string(without_cache) +
              " are held already, so at least " + std::to_string(without_cache + bytes) +
              " are needed. Raise `dram_bytes`, or shorten the context, the batch or `window`.");
    }
    if (yield_) yield_(bytes - (limit_ - total_));
  }
  if (bytes > limit_ - total_) {
    throw Error(ErrorKind::kCapacity, "`dram_bytes` (" + std::to_string(limit_) +
                                          ") has no room for " + std::to_string(bytes) +
                                          " bytes of " + std::string(name_of(use)));
  }
  used_[static_cast<int>(use)] += bytes;
  total_ += bytes;
  peak_ = std::max(peak_, total_);
}

void Budget::release(Use use, uint64_t bytes) noexcept {
  uint64_t& held = used_[static_cast<int>(use)];
  bytes = std::min(bytes, held);
  held -= bytes;
  total_ -= bytes;
}

}  // namespace swarm_kv
