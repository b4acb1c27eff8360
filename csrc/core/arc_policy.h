#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/cache_policy.h"

namespace swarm_kv {

// "arc": two lists of cached entries, activated once and more often since they came, and two of
// entries that have left them. One that is missed soon after it left its list makes room for that
// list. The lists of those that left are as long as the cache is full.
class ArcPolicy : public CachePolicy {
 public:
  void begin(const Segment& segment, const std::vector<DriveShape>& drives) override;
  // Entries that come before the first step come in descending worth; the profile says which list.
  void prime(std::span<const int32_t> activations, int64_t queries) override;
  void touch(std::span<const int32_t> entries) override;
  double worth(int32_t entry) const override;
  void insert(int32_t entry) override;
  int32_t pop() override;
  void restore(int32_t entry) override;
  void leave(int32_t entry) override;
  void erase(int32_t entry) override;
  uint64_t bytes() const override;

 private:
  enum List : uint8_t { kRecent, kFrequent, kLeftRecent, kLeftFrequent, kNone };
  static constexpr int kLists = kNone;

  // Lists are rings through a head of their own behind the entries.
  int32_t head(List list) const { return entries_ + list; }
  void link_after(int32_t before, int32_t entry, List list);
  void link_newest(List list, int32_t entry) { link_after(head(list), entry, list); }
  void link_oldest(List list, int32_t entry) { link_after(previous_[head(list)], entry, list); }
  void unlink(int32_t entry);
  int64_t cached() const { return size_[kRecent] + size_[kFrequent]; }

  int32_t entries_ = 0;
  int32_t step_ = 0;
  double target_ = 0;  // entries of kRecent that the cache should hold
  std::array<int64_t, kLists> size_{};
  std::vector<int32_t> next_;      // per entry and head, from newest to oldest
  std::vector<int32_t> previous_;  // the same backwards
  std::vector<int32_t> touched_;   // per entry: last step that activated it
  std::vector<uint8_t> list_;
};

}  // namespace swarm_kv
