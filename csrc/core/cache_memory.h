#pragma once

#include <cstdint>

namespace swarm_kv {

// Slots of one size that a cluster cache fills. A slot is named by its byte offset in the memory.
class CacheMemory {
 public:
  int64_t entry_bytes() const { return entry_bytes_; }
  int64_t cache_slot(int64_t index) const { return cache_base_ + index * entry_bytes_; }
  int64_t cache_slots_max() const { return entry_bytes_ == 0 ? 0 : cache_bytes_ / entry_bytes_; }

  // Copies one entry from slot to slot, which may be any of the memory.
  virtual void copy(int64_t to, int64_t from) const = 0;
  // Cache slots [first, last) are not used any more, nor is any from `last` on.
  virtual void discard_cache(int64_t first, int64_t last) const = 0;

 protected:
  // The cache may have the bytes from `cache_base` on.
  CacheMemory(int64_t cache_base, int64_t cache_bytes)
      : cache_base_(cache_base), cache_bytes_(cache_bytes) {}
  ~CacheMemory() = default;

  const int64_t cache_base_;
  const int64_t cache_bytes_;
  int64_t entry_bytes_ = 0;
};

}  // namespace swarm_kv
