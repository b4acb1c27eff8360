#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "bench/cases/data.h"
#include "core/cluster_cache.h"
#include "core/entry_pool.h"

namespace swarm_kv::bench {

// Steps on a full cluster cache of an eighth of the segment: count the activated tenth, look each
// entry up, and offer what is missing, for which others leave. Four of five entries are those of
// the step before. One run makes `kSteps` steps.
class Cache {
 public:
  static constexpr int64_t kSteps = 32;

  Cache(int64_t entries, int64_t entry_bytes, const std::string& policy)
      : pool_(entries * entry_bytes, 0, entries * entry_bytes, unlimited_),
        budget_(entries / 8 * ClusterCache::slot_bytes(entry_bytes)),
        cache_(pool_, budget_, policy, drives_),
        segment_(placed(scattered_clusters(entries, 0, random_), entries, entry_bytes)) {
    pool_.set_entry_bytes(entry_bytes);
    cache_.prepare(segment_);
    cache_.add(segment_);
    std::vector<int32_t> order = random_.permutation(entries);
    for (int64_t i = 0; i < kSteps; ++i) {
      for (int64_t n = 0; n < entries / 50; ++n) {
        std::swap(order[random_.below(entries / 10)], order[random_.below(entries)]);
      }
      steps_.emplace_back(order.begin(), order.begin() + entries / 10);
      std::sort(steps_.back().begin(), steps_.back().end());
    }
    std::memset(pool_.at(0), 1, entries * entry_bytes);
    run();
  }
  ~Cache() { cache_.remove(segment_); }

  void run() {
    for (const std::vector<int32_t>& step : steps_) {
      cache_.touch(segment_, step);
      missing_.clear();
      slots_.clear();
      for (const int32_t entry : step) {
        if (cache_.find(segment_, entry) >= 0) continue;
        missing_.push_back(entry);
        slots_.push_back(entry * pool_.entry_bytes());
      }
      cache_.admit(segment_, missing_, slots_);
    }
  }
  int64_t items() const { return kSteps * static_cast<int64_t>(steps_.front().size()); }
  int64_t bytes() const { return 0; }

 private:
  std::vector<DriveShape> drives_ = four_drives();
  Budget unlimited_{uint64_t{1} << 40};
  EntryPool pool_;
  Budget budget_;
  ClusterCache cache_;
  Random random_{2};
  Segment segment_;
  std::vector<std::vector<int32_t>> steps_;
  std::vector<int32_t> missing_;
  std::vector<int64_t> slots_;
};

}  // namespace swarm_kv::bench
