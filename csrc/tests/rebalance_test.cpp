#include "core/rebalance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "core/coalesce.h"
#include "core/placement.h"
#include "core/segment.h"

namespace swarm_kv {
namespace {

constexpr int64_t kEntryBytes = 4096;

Segment segment_of(Clusters clusters, int64_t entries, int64_t drives) {
  Turn turn;
  Placement placement = place(clusters, std::vector<double>(drives, 1), "sequential", turn);
  RoutingTable routing(clusters, entries);
  return Segment{.id = 1,
                 .label = "x",
                 .entries = entries,
                 .entry_bytes = kEntryBytes,
                 .clusters = std::move(clusters),
                 .placement = std::move(placement),
                 .routing = std::move(routing),
                 .drive_offset = std::vector<uint64_t>(drives, 0),
                 .checksum = {},
                 .residency = {}};
}

// Every entry in each of `copies` clusters that hold all entries; cluster c lies on drive c.
Segment whole_copies(int64_t entries, int64_t copies) {
  Clusters clusters;
  for (int64_t copy = 0; copy < copies; ++copy) {
    for (int64_t n = 0; n < entries; ++n) clusters.members.push_back((3 * n + copy) % entries);
    clusters.offsets.push_back(clusters.members.size());
  }
  return segment_of(std::move(clusters), entries, copies);
}

struct Plan {
  std::vector<Segment*> segments;
  WantedList wanted;
  std::vector<int32_t> chosen;

  // The first copy of each entry.
  Plan(Segment& segment, const std::vector<int64_t>& entries) : segments{&segment} {
    const std::vector<int32_t> only{0};
    const Selection row{only, {}, entries, segment.entries};
    dedupe(segments, std::span(&row, 1), true, wanted);
    for (const Wanted& entry : wanted.entries) chosen.push_back(entry.position_in(segment));
  }

  // By what is really read.
  std::vector<double> seconds(const DriveLoad& drives,
                              const std::vector<DriveShape>& shapes) const {
    std::vector<Piece> pieces;
    for (size_t i = 0; i < chosen.size(); ++i) {
      pieces.push_back({segments[0]->placement.drive[chosen[i]], segments[0]->offset_of(chosen[i]),
                        kEntryBytes, static_cast<int32_t>(i)});
    }
    std::vector<Read> reads;
    coalesce(pieces, shapes, 1 << 30, reads);
    std::vector<double> seconds;
    for (size_t drive = 0; drive < drives.size(); ++drive) seconds.push_back(drives.queued(drive));
    for (const Read& read : reads)
      seconds[read.drive] += drives.seconds(read.drive, 1, read.length);
    return seconds;
  }
};

std::vector<DriveShape> shapes_of(const std::vector<io::DeviceModel>& models) {
  std::vector<DriveShape> shapes;
  for (const io::DeviceModel& model : models) shapes.push_back({model, 512});
  return shapes;
}

// With a second of reads in the queue of `busy`.
DriveLoad with_queue(const std::vector<DriveShape>& shapes, int32_t busy) {
  DriveLoad load(shapes);
  const double bytes = 1 / shapes[busy].model.t_transfer;
  load.start({busy, 0, static_cast<uint64_t>(bytes), 0, 0});
  return load;
}

double largest(const std::vector<double>& seconds) {
  return *std::max_element(seconds.begin(), seconds.end());
}

std::vector<int64_t> first_entries(int64_t count) {
  std::vector<int64_t> entries(count);
  for (int64_t i = 0; i < count; ++i) entries[i] = i;
  return entries;
}

// A request costs as much as 1.5 entries.
const io::DeviceModel kFast{1.5e-4, 1e-4 / kEntryBytes};
const io::DeviceModel kSlow{4.5e-4, 3e-4 / kEntryBytes};

TEST(Rebalance, SharesWorkInSecondsNotInEntries) {
  Segment segment = whole_copies(400, 2);
  Plan plan(segment, first_entries(400));
  const auto shapes = shapes_of({kFast, kSlow});
  const DriveLoad drives(shapes);
  const auto before = plan.seconds(drives, shapes);
  EXPECT_EQ(before[1], 0);  // control: all first copies lie on one drive
  rebalance(plan.segments, plan.wanted, drives, plan.chosen);
  const auto after = plan.seconds(drives, shapes);
  EXPECT_NEAR(after[0], after[1], 0.1 * after[0]);
  EXPECT_LT(largest(after), 0.85 * before[0]);
}

TEST(Rebalance, LeavesOutADriveThatIsBusyOtherwise) {
  Segment segment = whole_copies(100, 2);
  Plan plan(segment, first_entries(100));
  const std::vector<int32_t> before = plan.chosen;
  const auto shapes = shapes_of({kFast, kFast});
  rebalance(plan.segments, plan.wanted, with_queue(shapes, 1), plan.chosen);
  EXPECT_EQ(plan.chosen, before);
  rebalance(plan.segments, plan.wanted, with_queue(shapes, 0), plan.chosen);
  for (const int32_t position : plan.chosen) EXPECT_EQ(segment.placement.drive[position], 1);
}

TEST(Rebalance, MovesNothingForLessThanPlanningTakes) {
  Segment segment = whole_copies(100, 2);
  Plan plan(segment, first_entries(100));
  const std::vector<int32_t> before = plan.chosen;
  const io::DeviceModel quick{1e-9, 1e-13};
  rebalance(plan.segments, plan.wanted, DriveLoad(shapes_of({quick, quick})), plan.chosen);
  EXPECT_EQ(plan.chosen, before);
}

TEST(Rebalance, NeverMakesTheLastDriveLaterAndReadsWhatIsWanted) {
  std::mt19937 random(5);
  double before = 0, after = 0;
  for (int trial = 0; trial < 60; ++trial) {
    const int64_t entries = 300, drives = 2 + random() % 6;
    Clusters clusters;
    std::vector<int32_t> order(entries);
    for (int32_t i = 0; i < entries; ++i) order[i] = i;
    for (int round = 0; round < 3; ++round) {  // three copies of each entry
      std::shuffle(order.begin(), order.end(), random);
      for (int64_t at = 0; at < entries;) {
        const int64_t size = std::min<int64_t>(1 + random() % 40, entries - at);
        clusters.members.insert(clusters.members.end(), order.begin() + at,
                                order.begin() + at + size);
        clusters.offsets.push_back(clusters.members.size());
        at += size;
      }
    }
    Segment segment = segment_of(std::move(clusters), entries, drives);
    std::shuffle(order.begin(), order.end(), random);
    Plan plan(segment, {order.begin(), order.begin() + 1 + random() % entries});
    std::vector<io::DeviceModel> models;
    for (int64_t d = 0; d < drives; ++d) models.push_back(random() % 2 != 0 ? kFast : kSlow);
    const auto shapes = shapes_of(models);
    DriveLoad load(shapes);
    load.start({0, 0, random() % 100 * kEntryBytes, 0, 0});
    const double first = largest(plan.seconds(load, shapes));
    rebalance(plan.segments, plan.wanted, load, plan.chosen);
    const double now = largest(plan.seconds(load, shapes));
    EXPECT_LE(now, first * (1 + 1e-9));
    before += first;
    after += now;
    for (size_t i = 0; i < plan.chosen.size(); ++i) {
      EXPECT_EQ(segment.clusters.members[plan.chosen[i]], plan.wanted.entries[i].entry);
    }
  }
  EXPECT_LT(after, 0.7 * before);
}

}  // namespace
}  // namespace swarm_kv
