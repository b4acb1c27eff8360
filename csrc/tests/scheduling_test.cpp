#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>

#include "core/coalesce.h"
#include "core/free_ranges.h"
#include "core/placement.h"
#include "core/router.h"
#include "core/segment.h"

namespace swarm_kv {
namespace {

TEST(Coalesce, CoversEveryPieceWithWholeBlocksAndNoMoreThanMaxRead) {
  std::mt19937 random(7);
  const std::vector<DriveShape> drives = {{{1e-5, 1e-9}, 512}, {{1e-5, 1e-9}, 4096}};
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<Piece> pieces;
    for (int i = 0; i < 60; ++i) {
      pieces.push_back({static_cast<int32_t>(random() % 2), random() % 400 * 768, 768, i});
    }
    std::vector<Read> reads;
    coalesce(pieces, drives, 64 << 10, reads);
    int covered = 0;
    for (const Read& read : reads) {
      const uint32_t block = drives[read.drive].block;
      EXPECT_EQ(read.offset % block, 0u);
      EXPECT_EQ(read.length % block, 0u);
      EXPECT_LE(read.length, 64u << 10);
      for (int32_t p = read.first; p < read.first + read.count; ++p) {
        EXPECT_EQ(pieces[p].drive, read.drive);
        EXPECT_GE(pieces[p].offset, read.offset);
        EXPECT_LE(pieces[p].offset + pieces[p].length, read.offset + read.length);
        ++covered;
      }
    }
    EXPECT_EQ(covered, 60);
  }
}

TEST(Coalesce, ReadsAGapOnlyWhereThatIsCheaperThanARequest) {
  // A request costs as much as 10000 bytes.
  const std::vector<DriveShape> drives = {{{1e-5, 1e-9}, 512}};
  std::vector<Read> reads;
  std::vector<Piece> near = {{0, 0, 512, 0}, {0, 512 + 9728, 512, 1}};
  coalesce(near, drives, 1 << 20, reads);
  EXPECT_EQ(reads.size(), 1u);
  std::vector<Piece> far = {{0, 0, 512, 0}, {0, 512 + 10240, 512, 1}};
  coalesce(far, drives, 1 << 20, reads);
  EXPECT_EQ(reads.size(), 2u);
}

TEST(Coalesce, DrivesTakeTurns) {
  const std::vector<DriveShape> drives(2, {{0, 1e-9}, 512});
  std::vector<Piece> pieces;
  for (int i = 0; i < 4; ++i) {
    pieces.push_back({0, static_cast<uint64_t>(i) * 8192, 512, 2 * i});
    pieces.push_back({1, static_cast<uint64_t>(i) * 8192, 512, 2 * i + 1});
  }
  std::vector<Read> reads;
  coalesce(pieces, drives, 1 << 20, reads);
  for (size_t i = 0; i < reads.size(); ++i) {
    EXPECT_EQ(reads[i].drive, static_cast<int32_t>(i % 2));
  }
}

// However the reads are cut into rounds, no drive waits for another one: a drive with large reads,
// and a slow one, keep pace with the others.
TEST(Coalesce, DrivesStayTogetherInTime) {
  const std::vector<DriveShape> drives = {
      {{1e-6, 1e-9}, 512}, {{1e-6, 1e-9}, 512}, {{3e-6, 3e-9}, 512}};
  constexpr int kReads[] = {400, 50, 133};
  constexpr uint64_t kBytes[] = {512, 4096 + 2560, 512};
  std::vector<Piece> pieces;
  for (int32_t drive = 0; drive < 3; ++drive) {
    for (int i = 0; i < kReads[drive]; ++i) {
      pieces.push_back({drive, static_cast<uint64_t>(i) << 20, kBytes[drive],
                        static_cast<int32_t>(pieces.size())});
    }
  }
  std::vector<Read> reads;
  coalesce(pieces, drives, 1 << 20, reads);
  std::vector<double> busy(3);
  std::vector<int> left(std::begin(kReads), std::end(kReads));
  double longest = 0;
  for (const Read& read : reads) {
    const double seconds = drives[read.drive].model.seconds(1, read.length);
    busy[read.drive] += seconds;
    longest = std::max(longest, seconds);
    --left[read.drive];
    if (*std::min_element(left.begin(), left.end()) == 0) break;
    const auto [least, most] = std::minmax_element(busy.begin(), busy.end());
    EXPECT_LE(*most - *least, longest);
  }
}

// Each entry has a copy in every one of `copies` clusters, rotated so that copies of one entry lie
// on different drives.
Segment replicated(int64_t entries, int64_t copies, int64_t drives) {
  Clusters clusters;
  for (int64_t copy = 0; copy < copies; ++copy) {
    for (int64_t n = 0; n < entries; ++n)
      clusters.members.push_back((entries - n + copy) % entries);
    clusters.offsets.push_back(clusters.members.size());
  }
  Turn turn;
  const Placement placement = place(clusters, std::vector<double>(drives, 1), "round_robin", turn);
  RoutingTable routing(clusters, entries);
  return Segment{.id = 1,
                 .label = "x",
                 .entries = entries,
                 .entry_bytes = 512,
                 .clusters = clusters,
                 .placement = placement,
                 .routing = routing,
                 .drive_offset = std::vector<uint64_t>(drives, 0),
                 .checksum = {},
                 .residency = {}};
}

std::vector<double> busy_seconds(const std::string& router, Segment& segment,
                                 const std::vector<int64_t>& entries,
                                 const std::vector<io::DeviceModel>& drives) {
  const std::vector<Segment*> segments{&segment};
  const std::vector<int32_t> only{0};
  const Selection row{only, {}, entries, segment.entries};
  WantedList wanted;
  dedupe(segments, std::span(&row, 1), true, wanted);
  std::vector<DriveShape> shapes;
  for (const io::DeviceModel& model : drives) shapes.push_back({model});
  std::vector<int32_t> chosen;
  make_router(router)->route(segments, wanted, DriveLoad(shapes), chosen);
  EXPECT_EQ(chosen.size(), wanted.entries.size());
  std::vector<double> busy(drives.size(), 0);
  for (size_t i = 0; i < chosen.size(); ++i) {
    EXPECT_EQ(segment.clusters.members[chosen[i]], wanted.entries[i].entry);
    const int32_t drive = segment.placement.drive[chosen[i]];
    busy[drive] += drives[drive].seconds(0, 512);
  }
  return busy;
}

TEST(Router, BalancesWhereReplicasAllow) {
  Segment segment = replicated(400, 2, 4);
  // Only entries whose first copy lies on drive 0.
  std::vector<int64_t> entries;
  for (int64_t n = 0; n < 400; n += 4) entries.push_back(n);
  const std::vector<io::DeviceModel> drives(4, {1e-6, 1e-9});
  const auto worst = [](std::vector<double> busy) {
    return *std::max_element(busy.begin(), busy.end());
  };
  const double fixed = worst(busy_seconds("dedup_only", segment, entries, drives));
  const double balanced = worst(busy_seconds("swarm", segment, entries, drives));
  EXPECT_LT(balanced, 0.6 * fixed);
}

TEST(Router, BalancesInSecondsNotInRequests) {
  Segment segment = replicated(400, 2, 2);
  std::vector<int64_t> entries(400);
  std::iota(entries.begin(), entries.end(), 0);
  const std::vector<io::DeviceModel> drives = {{1e-6, 1e-9},
                                               {1e-6, 4e-9}};  // one is 4 times slower
  const auto busy = busy_seconds("swarm", segment, entries, drives);
  EXPECT_NEAR(busy[0] / busy[1], 1.0, 0.1);
}

TEST(FreeRanges, NeverHandsOutTheSameByteTwice) {
  std::mt19937 random(3);
  FreeRanges free;
  free.give(0, 10000);
  std::map<uint64_t, uint64_t> held;
  uint64_t used = 0;
  for (int i = 0; i < 5000; ++i) {
    if (random() % 2 || held.empty()) {
      const uint64_t length = 1 + random() % 300;
      const auto offset = free.take(length);
      if (!offset) continue;
      const auto next = held.lower_bound(*offset);
      if (next != held.end()) {
        EXPECT_LE(*offset + length, next->first);
      }
      if (next != held.begin()) {
        EXPECT_GE(*offset, std::prev(next)->first + std::prev(next)->second);
      }
      held[*offset] = length;
      used += length;
    } else {
      auto victim = std::next(held.begin(), random() % held.size());
      free.give(victim->first, victim->second);
      used -= victim->second;
      held.erase(victim);
    }
  }
  for (const auto& [offset, length] : held) free.give(offset, length);
  EXPECT_EQ(free.take(10000), 0u);  // all neighbours were joined again
}

}  // namespace
}  // namespace swarm_kv
