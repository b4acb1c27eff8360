#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "core/budget.h"
#include "core/cache_memory.h"

namespace swarm_kv {

// One anonymous mapping; pages are given by the kernel on first touch and can be handed back.
class Region {
 public:
  explicit Region(uint64_t bytes);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }
  // Gives whole pages inside [offset, offset + bytes) back to the kernel; their content is lost.
  void discard(uint64_t offset, uint64_t bytes) const;

 private:
  std::byte* data_;
  uint64_t size_;
};

// The entries that a store holds in fast memory, all in one address range, so that attention names
// any of them (staged read, window, cached) by one kind of address: its byte offset, a "slot".
//
//   [ staging | window slots | cache slots ]
//
// Window slots are reference counted: sequences that were forked share them. They are taken from
// the budget in chunks. Cache slots belong to ClusterCache. Not thread-safe.
class EntryPool : public CacheMemory {
 public:
  // `window_bytes` and `cache_bytes` are address space, not memory. The region is kept alive by
  // whoever holds `region()`.
  EntryPool(uint64_t staging_bytes, uint64_t window_bytes, uint64_t cache_bytes, Budget& budget);
  ~EntryPool();

  // Fixes the size of one slot; the first call decides, a different size throws Error(kArgument).
  void set_entry_bytes(int64_t entry_bytes);

  const std::shared_ptr<Region>& region() const { return region_; }
  std::byte* at(int64_t slot) const { return region_->data() + slot; }

  // Takes `count` window slots, each with one reference. Throws Error(kCapacity); then none is
  // taken.
  std::vector<int64_t> allocate(int64_t count);
  // Adds or drops one reference of each slot. Throws Error(kArgument) if one is not allocated; then
  // none has changed.
  void retain(std::span<const int64_t> slots);
  void release(std::span<const int64_t> slots);
  // Whether somebody refers to the window slot.
  bool allocated(int64_t slot) const { return find(slot) >= 0; }
  int64_t window_slots() const { return window_slots_; }

  void copy(int64_t to, int64_t from) const override;
  // Gives their memory back to the kernel.
  void discard_cache(int64_t first, int64_t last) const override;

 private:
  struct Chunk {
    std::vector<int32_t> free;
    int64_t used = 0;
    bool reserved = false;
  };

  int64_t slot_of(int64_t index) const {
    return staging_bytes_ + index / chunk_slots_ * chunk_bytes_ +
           index % chunk_slots_ * entry_bytes_;
  }
  int64_t find(int64_t slot) const;  // index of an allocated slot, or -1
  int64_t index_of(int64_t slot) const;

  Budget& budget_;
  int64_t staging_bytes_;
  int64_t window_bytes_;
  std::shared_ptr<Region> region_;
  int64_t chunk_slots_ = 0;
  int64_t chunk_bytes_ = 0;  // whole pages, so that a chunk without entries leaves none behind
  int64_t window_slots_ = 0;
  std::vector<Chunk> chunks_;
  std::set<int64_t> open_chunks_;  // reserved chunks with a free slot, lowest first
  std::vector<int32_t> references_;
};

}  // namespace swarm_kv
