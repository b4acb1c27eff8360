#pragma once

#include <cstdint>
#include <vector>

#include "core/cache_policy.h"
#include "core/eviction_queue.h"
#include "core/segment.h"

namespace swarm_kv {

// A policy whose worth is one key per entry, cached or not, that only activations change, and only
// upwards. A subclass says how: in prime() and touch().
template <typename Key>
class KeyedPolicy : public CachePolicy {
 public:
  void begin(const Segment& segment, const std::vector<DriveShape>&) override {
    keys_.assign(segment.entries, Key{});
    queue_ = EvictionQueue<Key>(segment.entries);
  }
  double worth(int32_t entry) const override { return keys_[entry]; }
  void insert(int32_t entry) override { queue_.insert(entry, keys_[entry]); }
  int32_t pop() override {
    const int32_t least = queue_.top([this](int32_t entry) { return keys_[entry]; });
    if (least >= 0) queue_.pop();
    return least;
  }
  void restore(int32_t entry) override { insert(entry); }
  void leave(int32_t) override {}
  void erase(int32_t entry) override { queue_.erase(entry); }
  uint64_t bytes() const override { return keys_.size() * (sizeof(Key) + 1); }

 protected:
  void divide_keys(Key by) {
    for (Key& key : keys_) key /= by;
    queue_.divide(by);
  }

  std::vector<Key> keys_;

 private:
  EvictionQueue<Key> queue_{0};
};

}  // namespace swarm_kv
