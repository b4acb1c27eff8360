#include "core/read_plan.h"

namespace swarm_kv {

ReadPlan plan_reads(const std::vector<Segment*>& segments, const WantedList& wanted,
                    const Router& router, const std::vector<DriveShape>& drives,
                    uint64_t max_read) {
  std::vector<io::DeviceModel> models;
  for (const DriveShape& shape : drives) models.push_back(shape.model);
  ReadPlan plan;
  plan.chosen = router.route(segments, wanted, models);
  plan.pieces.reserve(plan.chosen.size());
  for (size_t i = 0; i < plan.chosen.size(); ++i) {
    const Segment& segment = *segments[wanted.entries[i].segment];
    plan.pieces.push_back({segment.placement.drive[plan.chosen[i]],
                           segment.offset_of(plan.chosen[i]),
                           static_cast<uint64_t>(segment.entry_bytes), static_cast<int32_t>(i)});
  }
  plan.reads = coalesce(plan.pieces, drives, max_read);
  return plan;
}

}  // namespace swarm_kv
