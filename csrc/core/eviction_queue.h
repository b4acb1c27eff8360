#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace swarm_kv {

// Entries by keys that only ever grow, least first; of equal keys the higher entry number goes
// first. An entry that is out keeps its key or comes back with a larger one.
//
// Only the least eighth of the entries stand in a heap, by keys that are brought up to date when
// they reach its top; all others have larger ones. So an entry whose key grows costs nothing until
// it would leave, and one that leaves costs, on average over those that do, eight steps of a scan
// and a heap of an eighth of the entries. Allocates only while it grows larger than ever before.
//
// Keys of several lanes cannot be compared with each other: each lane has a least entry.
template <typename Key>
class EvictionQueue {
 public:
  explicit EvictionQueue(int64_t entries, size_t lanes = 1) : lanes_(lanes), flags_(entries, 0) {}

  void insert(int32_t entry, Key key, size_t lane = 0) {
    Lane& own = lanes_[lane];
    if ((flags_[entry] & kListed) == 0) own.listed.push_back(entry);
    flags_[entry] = kListed | kIn;
    const Item item{key, entry};
    if (own.bounded && !later(item, own.bound)) push(own.least, item);
  }

  // Takes out an entry that is in.
  void erase(int32_t entry) { flags_[entry] &= ~kIn; }

  // The least entry, which stays in, or -1. `key_of(entry)` is its key now.
  template <typename KeyOf>
  int32_t top(const KeyOf& key_of, size_t lane = 0) {
    Lane& own = lanes_[lane];
    for (;;) {
      while (!own.least.empty()) {
        const Item item = own.least.front();
        const bool in = (flags_[item.entry] & kIn) != 0;
        const Item now{key_of(item.entry), item.entry};
        if (in && now.key == item.key) return item.entry;
        drop_top(own.least);
        if (in && !later(now, own.bound)) push(own.least, now);
      }
      if (!refill(own, key_of)) return -1;
    }
  }

  // Takes out what top() has just returned.
  void pop(size_t lane = 0) {
    erase(lanes_[lane].least.front().entry);
    drop_top(lanes_[lane].least);
  }

  size_t lanes() const { return lanes_.size(); }

  // Divides all keys, as their owner does.
  void divide(Key by) {
    for (Lane& lane : lanes_) {
      lane.bound.key /= by;
      for (Item& item : lane.least) item.key /= by;
    }
  }

 private:
  static constexpr size_t kShare = 8;
  static constexpr size_t kFewest = 32;
  static constexpr uint8_t kIn = 1;
  static constexpr uint8_t kListed = 2;

  struct Item {
    Key key;
    int32_t entry;
  };
  struct Lane {
    std::vector<int32_t> listed;  // all that are in, and some that have left
    std::vector<Item> least;      // a heap of those up to `bound`
    Item bound{};
    bool bounded = false;
  };

  static bool later(const Item& a, const Item& b) {
    return a.key != b.key ? a.key > b.key : a.entry < b.entry;
  }
  static void push(std::vector<Item>& heap, Item item) {
    heap.push_back(item);
    std::push_heap(heap.begin(), heap.end(), later);
  }
  static void drop_top(std::vector<Item>& heap) {
    std::pop_heap(heap.begin(), heap.end(), later);
    heap.pop_back();
  }

  template <typename KeyOf>
  bool refill(Lane& lane, const KeyOf& key_of) {
    std::erase_if(lane.listed, [this](int32_t entry) {
      if (flags_[entry] & kIn) return false;
      flags_[entry] = 0;
      return true;
    });
    for (const int32_t entry : lane.listed) lane.least.push_back({key_of(entry), entry});
    const size_t count = std::min(lane.least.size(), std::max(kFewest, lane.least.size() / kShare));
    if (count == 0) return false;
    const auto last = lane.least.begin() + static_cast<std::ptrdiff_t>(count) - 1;
    const auto earlier = [](const Item& a, const Item& b) { return later(b, a); };
    std::nth_element(lane.least.begin(), last, lane.least.end(), earlier);
    lane.bound = *last;
    lane.bounded = true;
    lane.least.resize(count);
    std::make_heap(lane.least.begin(), lane.least.end(), later);
    return true;
  }

  std::vector<Lane> lanes_;
  std::vector<uint8_t> flags_;
};

}  // namespace swarm_kv
