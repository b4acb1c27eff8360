#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace swarm_kv {

struct DriveShape;
struct Segment;

// What a segment's entries are worth in fast memory, and in which order the cached ones leave. One
// object per segment; it knows all of the segment's entries by their numbers. After its vectors
// have grown to the most that was ever cached, nothing allocates. Deterministic.
class CachePolicy {
 public:
  virtual ~CachePolicy() = default;

  // Begins with the entries of a segment that is placed, none of them cached.
  virtual void begin(const Segment& segment, const std::vector<DriveShape>& drives) = 0;

  // Before any step and any insert: how many of a profile's `queries` activated each entry. Worths
  // become those after decoding that went on like the profile for long.
  virtual void prime(std::span<const int32_t> activations, int64_t queries) = 0;

  // A decoding step activated these entries, each named once, cached or not.
  virtual void touch(std::span<const int32_t> entries) = 0;

  // What an entry is worth now: an uncached one takes the place of a cached one of less worth.
  virtual double worth(int32_t entry) const = 0;

  // The entry is cached from now on.
  virtual void insert(int32_t entry) = 0;
  // Takes the cached entry that should leave first out of the order, or returns -1. What follows is
  // either restore(), as if nothing had happened, or leave().
  virtual int32_t pop() = 0;
  virtual void restore(int32_t entry) = 0;
  // The popped entry is not cached any more.
  virtual void leave(int32_t entry) = 0;
  // A cached entry that was not popped is not cached any more.
  virtual void erase(int32_t entry) = 0;

  // Memory per entry of the segment, cached or not; the order of cached entries comes on top, at
  // most kOrderBytes each.
  virtual uint64_t bytes() const = 0;
  static constexpr int64_t kOrderBytes = 24;
};

// A policy by name; begin() comes next.
//   "lru"                the step of the last activation.
//   "lfu"                activations, the profile's included.
//   "decayed_frequency"  activations, each worth 0.85 of those a step later.
//   "swarm"              Eq. 6 of arXiv 2603.17803 for an entry as a cluster of one: f * T_base +
//                        T_transfer in seconds, both means over the drives that hold it. The
//                        counter f rises by 1 with an activation and falls by 1, not below 0, with
//                        a step in which the entry is cached and idle (section 6.2).
//   "arc"                adaptive replacement (Megiddo and Modha, FAST 2003): recent entries
//                        against repeated ones, in shares that follow what was evicted too early.
// With "lru" and "arc" an entry of the current step never makes room for another one, where by the
// textbook a step of more entries than the cache holds would leave nothing for the next.
// Throws Error(kArgument) listing the names.
std::unique_ptr<CachePolicy> make_cache_policy(const std::string& name);

}  // namespace swarm_kv
