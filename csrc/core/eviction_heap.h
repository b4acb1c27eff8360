#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace swarm_kv {

// Entries by keys that only ever grow, least first; of equal keys the higher entry number goes
// first. A heap holds each entry with a key that it had once and that is brought up to date when it
// reaches the top: an entry whose key grows costs nothing until then. An entry that is out keeps
// its key or comes back with a larger one. Allocates only while it grows larger than ever before.
//
// Keys of several lanes cannot be compared with each other: each lane has a least entry.
template <typename Key>
class EvictionHeap {
 public:
  explicit EvictionHeap(int64_t entries, size_t lanes = 1)
      : lanes_(lanes), state_(entries, State::kOut) {}

  void insert(int32_t entry, Key key, size_t lane = 0) {
    if (state_[entry] == State::kOut) push(lanes_[lane], {key, entry});
    state_[entry] = State::kIn;  // where an old item is still there, it is a lower bound
  }

  // Takes out an entry that is in.
  void erase(int32_t entry) { state_[entry] = State::kLeft; }

  // The least entry, which stays in, or -1. `key_of(entry)` is its key now.
  template <typename KeyOf>
  int32_t top(const KeyOf& key_of, size_t lane = 0) {
    std::vector<Item>& items = lanes_[lane];
    while (!items.empty()) {
      const Item least = items.front();
      const bool left = state_[least.entry] == State::kLeft;
      const Key key = key_of(least.entry);
      if (!left && key == least.key) return least.entry;
      drop_top(items);
      if (left) {
        state_[least.entry] = State::kOut;
      } else {
        push(items, {key, least.entry});
      }
    }
    return -1;
  }

  // Takes out what top() has just returned.
  void pop(size_t lane = 0) {
    state_[lanes_[lane].front().entry] = State::kOut;
    drop_top(lanes_[lane]);
  }

  size_t lanes() const { return lanes_.size(); }

  // Divides all keys, as their owner does.
  void divide(Key by) {
    for (auto& items : lanes_) {
      for (Item& item : items) item.key /= by;
    }
  }

 private:
  struct Item {
    Key key;
    int32_t entry;
  };
  enum class State : uint8_t { kOut, kIn, kLeft };  // left: not in, but an item is still there

  static bool later(const Item& a, const Item& b) {
    return a.key != b.key ? a.key > b.key : a.entry < b.entry;
  }
  static void push(std::vector<Item>& items, Item item) {
    items.push_back(item);
    std::push_heap(items.begin(), items.end(), later);
  }
  static void drop_top(std::vector<Item>& items) {
    std::pop_heap(items.begin(), items.end(), later);
    items.pop_back();
  }

  std::vector<std::vector<Item>> lanes_;
  std::vector<State> state_;
};

}  // namespace swarm_kv
