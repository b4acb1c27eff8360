#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/budget.h"
#include "core/cache_policy.h"
#include "core/entry_pool.h"
#include "core/segment.h"

namespace swarm_kv {

// Entries kept in fast memory because steps repeat themselves: looked up per entry, whatever
// cluster brought it in, and never held twice. The cache takes all of the budget that nobody else
// has reserved and gives it back on demand. Each segment has a share of the slots in proportion to
// its entries; within the share the policy's heat decides. Not thread-safe.
class ClusterCache {
 public:
  ClusterCache(EntryPool& pool, Budget& budget, std::unique_ptr<CachePolicy> policy);

  void add(Segment& segment);
  void remove(Segment& segment);

  // Before the first step: heats a segment's entries by its profile and copies `entries`, in order,
  // into memory that is free and then into the segment's share. `copy(entry, out)` writes one.
  void fill(Segment& segment, std::span<const int32_t> activations, int64_t queries,
            std::span<const int32_t> entries, const std::function<void(int32_t, std::byte*)>& copy);

  // Counts one decoding step's activated entries.
  void touch(Segment& segment, std::span<const int32_t> entries) {
    policy_->touch(segment.residency, entries);
  }

  // Slot (byte offset in the pool) of a cached entry, or -1.
  int64_t find(const Segment& segment, int64_t entry) const {
    const int32_t index = segment.residency.slot[entry];
    return index < 0 ? -1 : pool_.cache_slot(index);
  }
  // A cached entry stays where it is while it is pinned; each pin needs its unpin.
  void pin(const Segment& segment, int64_t entry) { ++owner_of(segment, entry).pins; }
  void unpin(const Segment& segment, int64_t entry) { --owner_of(segment, entry).pins; }

  // Offers entries that were read (slots in the pool) to the cache; the hotter ones are copied in.
  void admit(Segment& segment, std::span<const int32_t> entries, std::span<const int64_t> slots);

  // Gives up `bytes` of the budget, or less when pinned entries are in the way; entries that lie
  // there are dropped.
  void yield(uint64_t bytes);

  int64_t size() const { return size_; }

 private:
  struct Owner {
    Segment* segment = nullptr;
    int32_t entry = 0;
    int32_t position = 0;  // in the segment's list of cached entries
    int32_t pins = 0;      // fetches that point at the cached copy
  };

  Owner& owner_of(const Segment& segment, int64_t entry) {
    return owners_[segment.residency.slot[entry]];
  }
  bool pinned(const Segment& segment, int64_t entry) { return owner_of(segment, entry).pins > 0; }
  // What the budget is charged per slot: the entry and the lists that name it.
  int64_t slot_bytes() const;
  int64_t share_of(const Segment& segment) const;
  bool grow();
  void evict(Segment& segment, int32_t entry);
  // Takes a free slot for an entry and returns where its bytes belong.
  std::byte* put(Segment& segment, int32_t entry);
  // Free slots for the segment, up to `wanted`, from the budget or from segments above their share.
  void make_room(const Segment& segment, int64_t wanted);
  bool take_from_richest(const Segment& poor, int64_t wanted);
  // The segment's coldest cached entries that are not pinned, coldest first, up to `count`.
  std::vector<int32_t> coldest(const Segment& segment, int64_t count);

  EntryPool& pool_;
  Budget& budget_;
  std::unique_ptr<CachePolicy> policy_;
  std::vector<Owner> owners_;  // per slot index
  std::vector<int32_t> free_;  // slot indices without an owner
  std::vector<Segment*> segments_;
  int64_t total_entries_ = 0;
  int64_t size_ = 0;
};

}  // namespace swarm_kv
