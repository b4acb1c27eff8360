#include "core/simulate.h"

#include <algorithm>
#include <array>
#include <limits>

#include "core/parallel.h"
#include "core/step.h"
#include "io/error.h"

namespace swarm_kv {
namespace {

constexpr std::array<int32_t, 1> kOnly{0};

Segment segment_without_data(SimulatedLayout& layout) {
  Turn turn;
  Placement placement =
      place(layout.clusters, speeds(layout.drives, layout.entry_bytes), layout.placement, turn);
  RoutingTable routing(layout.clusters, layout.entries);
  return Segment{.id = 0,
                 .label = "simulated",
                 .entries = layout.entries,
                 .entry_bytes = layout.entry_bytes,
                 .clusters = std::move(layout.clusters),
                 .placement = std::move(placement),
                 .routing = std::move(routing),
                 .drive_offset = std::vector<uint64_t>(layout.drives.size(), 0),
                 .checksum = {},
                 .residency = {}};
}

}  // namespace

SimulatedReads simulate_reads(SimulatedLayout layout, std::span<const SimulatedStep> steps) {
  if (layout.entry_bytes < 1 || layout.entry_bytes > std::numeric_limits<int32_t>::max()) {
    throw Error(ErrorKind::kArgument, "simulate_reads: `entry_bytes` must be in [1, 2^31), got " +
                                          std::to_string(layout.entry_bytes));
  }
  const auto router = make_router(layout.router);
  Segment segment = segment_without_data(layout);
  const DriveLoad idle(layout.drives);
  const size_t drives = layout.drives.size();
  SimulatedReads result;
  result.requests.assign(steps.size() * drives, 0);
  result.bytes.assign(steps.size() * drives, 0);
  result.seconds.assign(steps.size(), 0);
  parallel_for(0, static_cast<int64_t>(steps.size()), 1, [&](int64_t first, int64_t last) {
    Step plan;
    plan.segments = {&segment};
    for (int64_t step = first; step < last; ++step) {
      const Selection row{kOnly, steps[step].clusters, steps[step].entries, segment.entries};
      plan.plan(
          std::span(&row, 1), *router, idle, layout.drives, [](WantedList&) {},
          std::max<uint64_t>(kMaxRead, segment.entry_bytes));
      int64_t* requests = &result.requests[step * drives];
      int64_t* bytes = &result.bytes[step * drives];
      for (const Read& read : plan.reads) {
        ++requests[read.drive];
        bytes[read.drive] += static_cast<int64_t>(read.length);
      }
      for (size_t d = 0; d < drives; ++d) {
        result.seconds[step] =
            std::max(result.seconds[step], layout.drives[d].model.seconds(requests[d], bytes[d]));
      }
    }
  });
  return result;
}

}  // namespace swarm_kv
