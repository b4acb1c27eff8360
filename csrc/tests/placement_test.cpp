#include "core/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "io/error.h"

namespace swarm_kv {
namespace {

// Descending members, so that no cluster is a stretch of the sequence; `loose` more entries follow.
Clusters clusters_of(const std::vector<int64_t>& sizes, int64_t loose = 0) {
  Clusters clusters;
  int32_t next = 0;
  for (const int64_t size : sizes) {
    for (int64_t j = 0; j < size; ++j) clusters.members.push_back(next + size - 1 - j);
    next += size;
    clusters.offsets.push_back(clusters.members.size());
  }
  for (int64_t j = 0; j < loose; ++j) clusters.members.push_back(next++);
  return clusters;
}

// Clusters that are stretches of the sequence.
Clusters stretches(const std::vector<int64_t>& sizes) {
  Clusters clusters = clusters_of(sizes);
  std::iota(clusters.members.begin(), clusters.members.end(), 0);
  return clusters;
}

Clusters random_clusters(std::mt19937& random) {
  std::vector<int64_t> sizes(random() % 40);
  for (int64_t& size : sizes) size = 1 + random() % 70;
  const int64_t loose = random() % 2 ? random() % 300 : 0;
  return random() % 4 ? clusters_of(sizes, loose) : stretches(sizes);
}

std::vector<double> equal(int64_t drives) { return std::vector<double>(drives, 2.5e4); }

std::vector<int> drives_of(const Placement& placement) {
  return {placement.drive.begin(), placement.drive.end()};
}

// What is wrong with the extents of a placement, or "".
std::string violation(const Clusters& clusters, const Placement& placement) {
  const size_t copies = clusters.members.size();
  if (placement.drive.size() != copies || placement.slot.size() != copies) return "copies";
  std::vector<int64_t> end(placement.drive_entries.size(), 0);
  for (size_t p = 0; p < copies; ++p) {
    if (placement.drive[p] >= end.size()) return "drive";
    // In order and without gaps per drive: shares are contiguous, and nothing overlaps.
    if (placement.slot[p] != end[placement.drive[p]]++) return "gap or overlap";
  }
  return end == placement.drive_entries ? "" : "drive entries";
}

TEST(Placement, RoundRobinFollowsEquation7) {
  Turn turn;
  const Placement placement = place(clusters_of({3, 1, 6}), equal(4), "round_robin", turn);
  EXPECT_EQ(drives_of(placement), (std::vector<int>{0, 1, 2, 3, 0, 1, 2, 3, 0, 1}));
  EXPECT_EQ(placement.slot, (std::vector<uint32_t>{0, 0, 0, 0, 1, 1, 1, 1, 2, 2}));
  EXPECT_EQ(placement.drive_entries, (std::vector<int64_t>{3, 3, 2, 2}));
  EXPECT_EQ(turn.next, 10);
}

TEST(Placement, RoundRobinCarriesOver) {
  Turn turn;
  place(clusters_of({3, 3}), equal(4), "round_robin", turn);
  const Placement next = place(clusters_of({2}), equal(4), "round_robin", turn);
  EXPECT_EQ(drives_of(next), (std::vector<int>{2, 3}));
  EXPECT_EQ(next.slot[0], 0u);
  EXPECT_EQ(turn.next, 8);
}

TEST(Placement, FurtherPartsBeginWhereTheyAreTold) {
  const Clusters clusters = clusters_of({3, 2, 2, 2});
  const std::vector<int32_t> starts{-1, 2, -1, 3};
  Turn turn;
  const Placement striped = place(clusters, equal(4), "round_robin", turn, starts);
  EXPECT_EQ(drives_of(striped), (std::vector<int>{0, 1, 2, 2, 3, 3, 0, 3, 0}));
  EXPECT_EQ(violation(clusters, striped), "");
  EXPECT_EQ(turn.next, 5);  // of the clusters that are new
  turn = {};
  const Placement whole = place(clusters, equal(4), "sequential", turn, starts);
  EXPECT_EQ(drives_of(whole), (std::vector<int>{0, 0, 0, 2, 2, 1, 1, 3, 3}));
  EXPECT_EQ(turn.next, 2);
  // These have a rule of their own.
  for (const char* name : {"fixed_start", "weighted"}) {
    Turn with, without;
    EXPECT_EQ(drives_of(place(clusters, equal(4), name, with, starts)),
              drives_of(place(clusters, equal(4), name, without)));
    EXPECT_EQ(with.next, without.next);
  }
}

TEST(Placement, RefusesStartsThatDoNotFit) {
  Turn turn;
  for (const std::vector<int32_t>& starts :
       {std::vector<int32_t>{0}, std::vector<int32_t>{0, 4}, std::vector<int32_t>{0, -2}}) {
    EXPECT_THROW(place(clusters_of({3, 3}), equal(4), "sequential", turn, starts), Error);
  }
  EXPECT_EQ(turn.next, 0);
}

TEST(Placement, FixedStartAlwaysBeginsAtDriveZero) {
  Turn turn{7, {}};
  const Placement placement = place(clusters_of({3, 1, 5}), equal(4), "fixed_start", turn);
  EXPECT_EQ(drives_of(placement), (std::vector<int>{0, 1, 2, 0, 0, 1, 2, 3, 0}));
}

TEST(Placement, SequentialTakesDrivesInTurn) {
  Turn turn;
  const Placement placement = place(clusters_of({3, 1, 2}), equal(2), "sequential", turn);
  EXPECT_EQ(drives_of(placement), (std::vector<int>{0, 0, 0, 1, 0, 0}));
  EXPECT_EQ(turn.next, 3);
  const Placement next = place(stretches({40, 5}), equal(2), "sequential", turn);
  EXPECT_EQ(next.drive_entries, (std::vector<int64_t>{5, 40}));  // whole, in token order too
}

TEST(Placement, WeightedSplitsEveryStretchOfMembersByTheWeights) {
  const std::vector<double> weights = {4, 1, 2};
  std::mt19937 random(3);
  std::vector<int64_t> sizes(300);
  for (int64_t& size : sizes) size = 1 + random() % 4;  // too small to be split one by one
  Turn turn;
  const Placement placement = place(clusters_of(sizes), weights, "weighted", turn);
  const auto copies = static_cast<int64_t>(placement.drive.size());
  for (int64_t first = 0; first + 70 <= copies; first += 23) {
    std::vector<int> count(3);
    for (int64_t p = first; p < first + 70; ++p) ++count[placement.drive[p]];
    for (int d = 0; d < 3; ++d) EXPECT_NEAR(count[d], 10 * weights[d], 2) << first << " " << d;
  }
  const Placement next = place(clusters_of({1}), weights, "weighted", turn);  // where it left off
  Turn fresh;
  Clusters all = clusters_of(sizes);
  all.members.push_back(copies);
  all.offsets.push_back(copies + 1);
  EXPECT_EQ(place(all, weights, "weighted", fresh).drive.back(), next.drive[0]);
}

TEST(Placement, WeightedWithEqualWeightsIsRoundRobin) {
  for (const int64_t drives : {1, 2, 3, 7, 255}) {
    for (const double weight : {1.0, 1.0 / 3, 3e-9}) {
      Turn a, b;
      for (uint32_t seed = 0; seed < 5; ++seed) {
        std::mt19937 random(seed);
        std::vector<int64_t> sizes(50);
        for (int64_t& size : sizes) size = 1 + random() % 70;
        const std::vector<double> weights(drives, weight);
        ASSERT_EQ(place(clusters_of(sizes), weights, "weighted", a).drive,
                  place(clusters_of(sizes), weights, "round_robin", b).drive);
      }
    }
  }
}

TEST(Placement, WeightedGivesAVerySlowDriveAlmostNothing) {
  Turn turn;
  const Placement placement =
      place(clusters_of({5000}), std::vector<double>{1, 1e-3, 1e-12}, "weighted", turn);
  EXPECT_NEAR(placement.drive_entries[1], 5, 1);
  EXPECT_LE(placement.drive_entries[2], 1);
}

TEST(Placement, EntriesInTokenOrderStayTogetherUnderEveryStrategy) {
  for (const std::string& name : placement_names()) {
    Turn turn;
    const Placement loose = place(clusters_of({5, 2}, 150), equal(3), name, turn);
    for (int64_t at = 0; at < 150; ++at) {  // runs of 16, each on another drive than the one before
      const int64_t p = 7 + at;
      if (at % kRun != 0) {
        EXPECT_EQ(loose.drive[p], loose.drive[p - 1]) << name;
        EXPECT_EQ(loose.slot[p], loose.slot[p - 1] + 1) << name;
      } else if (at > 0) {
        EXPECT_NE(loose.drive[p], loose.drive[p - 1]) << name;
      }
    }
    const auto [low, high] =
        std::minmax_element(loose.drive_entries.begin(), loose.drive_entries.end());
    EXPECT_LE(*high - *low, 2 * kRun) << name;

    const Placement blocks =
        place(stretches(std::vector<int64_t>(12, 16)), equal(3), name, turn = {});
    EXPECT_EQ(blocks.drive_entries, (std::vector<int64_t>{64, 64, 64})) << name;
    for (int64_t p = 0; p < 192; ++p) EXPECT_EQ(blocks.drive[p], p / 16 % 3) << name;
  }
  // A pair of neighbours is a cluster like others.
  Turn turn;
  EXPECT_EQ(drives_of(place(stretches({2, 3}), equal(3), "round_robin", turn)),
            (std::vector<int>{0, 1, 2, 2, 2}));
}

TEST(Placement, ExtentsAreDenseAndDisjoint) {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    std::mt19937 random(seed);
    const Clusters clusters = random_clusters(random);
    for (const std::string& name : placement_names()) {
      for (const int64_t drives : {1, 2, 3, 8, 100}) {
        std::vector<double> weights(drives);
        for (double& weight : weights) weight = 1.0 + random() % 9;
        Turn turn{static_cast<int64_t>(random() % 1000), {}};
        const Placement placement = place(clusters, weights, name, turn);
        ASSERT_EQ(violation(clusters, placement), "") << name << " " << drives;
      }
    }
  }
}

TEST(Placement, CheckerNoticesAnOverlap) {
  const Clusters clusters = clusters_of({5, 9, 2}, 40);
  Turn turn;
  const Placement good = place(clusters, equal(3), "round_robin", turn);
  ASSERT_EQ(violation(clusters, good), "");
  Placement bad = good;
  --bad.slot[7];
  EXPECT_EQ(violation(clusters, bad), "gap or overlap");
  bad = good;
  bad.drive[5] = (bad.drive[5] + 1) % 3;
  EXPECT_EQ(violation(clusters, bad), "gap or overlap");
  bad = good;
  ++bad.drive_entries[1];
  EXPECT_EQ(violation(clusters, bad), "drive entries");
}

TEST(Placement, RoundRobinBalancesWithinOneEntry) {
  std::mt19937 random(5);
  for (int round = 0; round < 20; ++round) {
    std::vector<int64_t> sizes(random() % 40);
    for (int64_t& size : sizes) size = 1 + random() % 70;
    Turn turn;
    const Placement placement = place(clusters_of(sizes), equal(7), "round_robin", turn);
    const auto [low, high] =
        std::minmax_element(placement.drive_entries.begin(), placement.drive_entries.end());
    EXPECT_LE(*high - *low, 1);
  }
  // What Eq. 7 is for: with a fixed start, small clusters pile up on the first drives.
  Turn turn;
  const Placement fixed =
      place(clusters_of(std::vector<int64_t>(50, 1)), equal(7), "fixed_start", turn);
  EXPECT_EQ(fixed.drive_entries[0], 50);
}

TEST(Placement, OneDriveHoldsEverything) {
  Turn turn;
  for (const std::string& name : placement_names()) {
    const Placement placement = place(clusters_of({2, 3}, 40), equal(1), name, turn);
    EXPECT_EQ(placement.drive_entries, (std::vector<int64_t>{45}));
  }
}

TEST(Placement, NoClusters) {
  Turn turn{3, {}};
  const Placement placement = place(Clusters{}, equal(2), "round_robin", turn);
  EXPECT_TRUE(placement.drive.empty());
  EXPECT_EQ(placement.drive_entries, (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(turn.next, 3);
}

TEST(Placement, BadArgumentsLeaveTheTurnAlone) {
  const Clusters clusters = clusters_of({2, 3});
  Turn turn{11, {1, -1}};
  const double infinity = std::numeric_limits<double>::infinity();
  for (const std::vector<double>& weights :
       {std::vector<double>{}, equal(256), {1, 0}, {-1, 1}, {1, infinity}, {std::nan(""), 1}}) {
    EXPECT_THROW(place(clusters, weights, "weighted", turn), Error);
  }
  EXPECT_NO_THROW(place(clusters, equal(255), "round_robin", turn));
  turn.next = 11;
  Clusters bad = clusters;
  bad.offsets.back() = 6;
  EXPECT_THROW(place(bad, equal(2), "round_robin", turn), Error);
  Turn negative{-1, {}};
  EXPECT_THROW(place(clusters, equal(2), "round_robin", negative), Error);
  try {
    place(clusters, equal(2), "raid0", turn);
    FAIL() << "no exception";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kArgument);
    for (const std::string& name : placement_names()) {
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
  }
  EXPECT_EQ(turn.next, 11);
  EXPECT_EQ(turn.credit, (std::vector<int64_t>{1, -1}));
}

}  // namespace
}  // namespace swarm_kv
