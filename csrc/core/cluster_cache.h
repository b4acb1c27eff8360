#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/budget.h"
#include "core/cache_memory.h"
#include "core/coalesce.h"
#include "core/segment.h"

namespace swarm_kv {

// Entries kept in fast memory because steps repeat themselves: looked up per entry, whatever
// cluster brought it in, and never held twice. The cache takes all of the budget that nobody else
// has reserved and gives it back on demand. Each segment has a share of the slots in proportion to
// its entries; within the share the policy decides, which keeps an order of its own per segment.
// Not thread-safe.
class ClusterCache {
 public:
  // `policy` by name, as make_cache_policy takes it. `drives` are those of the segments'
  // placements; they may be filled in until the first prepare(). What the cache knows of a segment
  // is its `residency`; the host's samples how far apart activations are, too.
  ClusterCache(const CacheMemory& memory, Budget& budget, const std::string& policy,
               const std::vector<DriveShape>& drives,
               Residency Segment::* residency = &Segment::residency);

  // Gives a placed segment what the cache keeps per entry. Before add().
  void prepare(Segment& segment) const;
  void add(Segment& segment);
  void remove(Segment& segment);

  // Before the first step: rates a segment's entries by its profile and copies `entries`, in order,
  // into memory that is free and then into the segment's share. `copy(entry, slot)` writes one.
  void fill(Segment& segment, std::span<const int32_t> activations, int64_t queries,
            std::span<const int32_t> entries, const std::function<void(int32_t, int64_t)>& copy);

  // Counts one decoding step's activated entries.
  void touch(Segment& segment, std::span<const int32_t> entries) {
    Residency& residency = of(segment);
    residency.policy->touch(entries);
    if (residency.sample) residency.sample->touch(entries, reuse_);
  }

  // Slot (byte offset in the memory) of a cached entry, or -1.
  int64_t find(const Segment& segment, int64_t entry) const {
    const int32_t index = (segment.*residency_).slot[entry];
    return index < 0 ? -1 : memory_.cache_slot(index);
  }
  // A cached entry stays where it is while it is pinned; each pin needs its unpin.
  void pin(const Segment& segment, int64_t entry) { ++owner_of(segment, entry).pins; }
  void unpin(const Segment& segment, int64_t entry) { --owner_of(segment, entry).pins; }
  // Asks early for what pin() and unpin() need of a cached entry, which lies anywhere: without,
  // each of them waits for memory.
  void foresee(const Segment& segment, int64_t entry) const {
    const int32_t index = (segment.*residency_).slot[entry];
    if (index >= 0) __builtin_prefetch(owners_.data() + index, 1);
  }

  // Offers entries that were read (slots in the memory) to the cache; those of most worth are
  // copied in.
  void admit(Segment& segment, std::span<const int32_t> entries, std::span<const int64_t> slots);

  struct Offer {
    int64_t segment;  // a number that its caller knows it by
    int32_t entry;
    int64_t slot;
  };
  // The same for several segments, in the order of their numbers. Sorts `offers`, of which several
  // may be of one entry.
  void admit(std::vector<Offer>& offers, const std::function<Segment&(int64_t)>& segment_of);

  // Gives up `bytes` of the budget, or less when pinned entries are in the way, and with them
  // entries of least worth.
  void yield(uint64_t bytes);

  int64_t size() const { return size_; }

  // Of all activations since the store opened.
  const ReuseDistances& reuse() const { return reuse_; }

  // What the budget is charged per cached entry: its bytes and the lists that name it.
  static int64_t slot_bytes(int64_t entry_bytes) {
    return entry_bytes + static_cast<int64_t>(sizeof(Owner) + sizeof(free_[0])) +
           CachePolicy::kOrderBytes;
  }

 private:
  struct Owner {
    Segment* segment = nullptr;
    int32_t entry = 0;
    int32_t pins = 0;  // fetches that point at the cached copy
  };

  Owner& owner_of(const Segment& segment, int64_t entry) {
    return owners_[(segment.*residency_).slot[entry]];
  }
  Residency& of(Segment& segment) const { return segment.*residency_; }
  int64_t slot_bytes() const { return slot_bytes(memory_.entry_bytes()); }
  int64_t share_of(const Segment& segment) const;
  bool grow();
  // Takes a free slot for an entry and returns it.
  int64_t put(Segment& segment, int32_t entry);
  void move(int32_t from, int32_t to);
  // The segment's cached entry that should leave first of those that are not pinned, out of the
  // policy's order, or -1. Pinned ones before it stay out of the order, too, until restore_skipped.
  int32_t pop_least(Segment& segment);
  void restore_skipped(Segment& segment);
  void evict_popped(Segment& segment, int32_t entry);
  void free_slot(Segment& segment, int32_t entry);
  // Free slots for the segment, up to `wanted`, from the budget or from segments above their share.
  void make_room(const Segment& segment, int64_t wanted);
  bool take_from_richest(const Segment& poor, int64_t wanted);

  struct Candidate {
    double worth;
    int32_t entry;
    int64_t slot;
  };

  const CacheMemory& memory_;
  Budget& budget_;
  const std::string policy_;
  const std::vector<DriveShape>& drives_;
  Residency Segment::* const residency_;
  std::vector<Owner> owners_;  // per slot index
  std::vector<int32_t> free_;  // slot indices without an owner
  std::vector<Segment*> segments_;
  std::vector<int32_t> entries_;  // scratch of admit(), with the next two
  std::vector<int64_t> slots_;
  std::vector<Candidate> candidates_;
  std::vector<int32_t> skipped_;  // of pop_least()
  int64_t total_entries_ = 0;
  int64_t size_ = 0;
  ReuseDistances reuse_;
};

}  // namespace swarm_kv
