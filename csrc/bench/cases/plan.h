#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "bench/cases/data.h"
#include "core/router.h"
#include "core/step.h"

namespace swarm_kv::bench {

enum class Layout {
  kIntervals,  // entries have one copy; single ones are selected, in stretches of the layout
  kReplicas,   // 1.4 copies; whole clusters are selected and, for a third of the budget, entries
};

// Step::plan of a tenth of a segment's entries on four drives, three quarters of them in fast
// memory already. One run plans `kSteps` steps.
class Plan {
 public:
  static constexpr int64_t kSteps = 8;

  Plan(int64_t entries, Layout layout)
      : segment_(placed(
            scattered_clusters(entries, layout == Layout::kReplicas ? 2 * entries / 5 : 0, random_),
            entries, 4096)) {
    for (int64_t i = 0; i < entries; ++i) cached_.push_back(random_.below(4) > 0);
    for (int64_t i = 0; i < kSteps; ++i) {
      if (layout == Layout::kIntervals) {
        std::vector<int64_t> taken = stretches(entries, 24, random_);
        for (int64_t& n : taken) n = segment_.clusters.members[n];
        steps_.push_back({{}, std::move(taken)});
      } else {
        std::vector<int64_t> clusters = stretches(segment_.clusters.count() * 2 / 3, 2, random_);
        for (int64_t& n : clusters) n = n * 3 / 2;
        steps_.push_back({std::move(clusters), stretches(entries / 3, 2, random_)});
      }
      entries_ += static_cast<int64_t>(steps_.back().entries.size()) +
                  kClusterSize * static_cast<int64_t>(steps_.back().clusters.size());
    }
    plan_.segments = {&segment_};
  }

  void run() {
    static constexpr int32_t kOnly[] = {0};
    for (const Selected& step : steps_) {
      const Selection row{kOnly, step.clusters, step.entries, segment_.entries};
      const auto minus = [&](WantedList& wanted) {
        std::erase_if(wanted.entries, [&](const Wanted& entry) { return cached_[entry.entry]; });
      };
      plan_.plan(std::span(&row, 1), *router_, load_, drives_, minus, kMaxRead);
    }
  }
  int64_t items() const { return entries_; }  // selected
  int64_t bytes() const { return 0; }

 private:
  struct Selected {
    std::vector<int64_t> clusters, entries;
  };

  Random random_{1};
  Segment segment_;
  std::vector<DriveShape> drives_ = four_drives();
  DriveLoad load_{drives_};
  std::unique_ptr<Router> router_ = make_router("swarm");
  std::vector<bool> cached_;
  std::vector<Selected> steps_;
  int64_t entries_ = 0;
  Step plan_;
};

}  // namespace swarm_kv::bench
