#include "core/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <set>
#include <tuple>

#include "io/error.h"

namespace swarm_kv {
namespace {

Clusters clusters_of(const std::vector<int64_t>& sizes) {
  Clusters clusters;
  for (const int64_t size : sizes) {
    for (int64_t j = 0; j < size; ++j) {
      clusters.members.push_back(static_cast<int64_t>(clusters.members.size()));
    }
    clusters.offsets.push_back(static_cast<int64_t>(clusters.members.size()));
  }
  return clusters;
}

Clusters random_clusters(std::mt19937& random) {
  std::vector<int64_t> sizes(random() % 40);
  for (int64_t& size : sizes) size = 1 + random() % 70;
  return clusters_of(sizes);
}

std::vector<int32_t> drives_of(const Placement& placement) {
  std::vector<int32_t> drives;
  for (const Copy& copy : placement.copies) drives.push_back(copy.drive);
  return drives;
}

// What is wrong with the extents of a placement, or "".
std::string violation(const Clusters& clusters, const Placement& placement, int64_t entry_bytes) {
  if (placement.copies.size() != clusters.members.size()) return "copies";
  const size_t drives = placement.drive_bytes.size();
  std::vector<std::set<int64_t>> offsets(drives);
  std::vector<int32_t> last_cluster(drives, -1);
  std::vector<int64_t> end(drives, 0);
  for (int64_t c = 0; c < clusters.count(); ++c) {
    for (int64_t p = clusters.offsets[c]; p < clusters.offsets[c + 1]; ++p) {
      const Copy& copy = placement.copies[p];
      if (copy.cluster != c) return "cluster";
      if (p == clusters.offsets[c] && copy.drive != placement.start_drive[c]) return "start drive";
      // In order and without gaps per drive: shares are contiguous, and nothing overlaps.
      if (copy.byte_offset != end[copy.drive]) return "gap or overlap";
      end[copy.drive] += entry_bytes;
    }
  }
  if (end != placement.drive_bytes) return "drive bytes";
  return "";
}

TEST(Placement, RoundRobinFollowsEquation7) {
  int64_t p_global = 0;
  const Placement placement = place(clusters_of({3, 1, 6}), 100, 4, "round_robin", p_global);
  EXPECT_EQ(placement.start_drive, (std::vector<int32_t>{0, 3, 0}));
  EXPECT_EQ(drives_of(placement), (std::vector<int32_t>{0, 1, 2, 3, 0, 1, 2, 3, 0, 1}));
  std::vector<int64_t> offsets;
  for (const Copy& copy : placement.copies) offsets.push_back(copy.byte_offset);
  EXPECT_EQ(offsets, (std::vector<int64_t>{0, 0, 0, 0, 100, 100, 100, 100, 200, 200}));
  EXPECT_EQ(placement.drive_bytes, (std::vector<int64_t>{300, 300, 200, 200}));
  EXPECT_EQ(p_global, 10);
}

TEST(Placement, RoundRobinCarriesOver) {
  int64_t p_global = 0;
  place(clusters_of({3, 3}), 100, 4, "round_robin", p_global);
  const Placement next = place(clusters_of({2}), 100, 4, "round_robin", p_global);
  EXPECT_EQ(drives_of(next), (std::vector<int32_t>{2, 3}));
  EXPECT_EQ(next.copies[0].byte_offset, 0);
  EXPECT_EQ(p_global, 8);
}

TEST(Placement, FixedStartAlwaysBeginsAtDriveZero) {
  int64_t p_global = 7;
  const Placement placement = place(clusters_of({3, 1, 5}), 8, 4, "fixed_start", p_global);
  EXPECT_EQ(placement.start_drive, (std::vector<int32_t>{0, 0, 0}));
  EXPECT_EQ(drives_of(placement), (std::vector<int32_t>{0, 1, 2, 0, 0, 1, 2, 3, 0}));
}

TEST(Placement, SequentialTakesDrivesInTurn) {
  int64_t p_global = 0;
  const Placement placement = place(clusters_of({3, 1, 2}), 8, 2, "sequential", p_global);
  EXPECT_EQ(drives_of(placement), (std::vector<int32_t>{0, 0, 0, 1, 0, 0}));
  EXPECT_EQ(p_global, 3);
  const Placement next = place(clusters_of({2}), 8, 2, "sequential", p_global);
  EXPECT_EQ(drives_of(next), (std::vector<int32_t>{1, 1}));
}

TEST(Placement, ExtentsAreDenseAndDisjoint) {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    std::mt19937 random(seed);
    const Clusters clusters = random_clusters(random);
    for (const std::string& name : placement_names()) {
      for (const int64_t drives : {1, 2, 3, 8, 100}) {
        int64_t p_global = random() % 1000;
        const Placement placement = place(clusters, 1536, drives, name, p_global);
        ASSERT_EQ(violation(clusters, placement, 1536), "") << name << " " << drives;
      }
    }
  }
}

TEST(Placement, CheckerNoticesAnOverlap) {
  const Clusters clusters = clusters_of({5, 9, 2});
  int64_t p_global = 0;
  const Placement good = place(clusters, 64, 3, "round_robin", p_global);
  Placement bad = good;
  bad.copies[7].byte_offset -= 64;
  EXPECT_EQ(violation(clusters, bad, 64), "gap or overlap");
  bad = good;
  bad.copies[5].drive = (bad.copies[5].drive + 1) % 3;
  EXPECT_EQ(violation(clusters, bad, 64), "start drive");
  EXPECT_NE(violation(clusters, good, 65), "");
}

TEST(Placement, RoundRobinBalancesWithinOneEntry) {
  std::mt19937 random(5);
  for (int round = 0; round < 20; ++round) {
    const Clusters clusters = random_clusters(random);
    int64_t p_global = 0;
    const Placement placement = place(clusters, 10, 7, "round_robin", p_global);
    const auto [low, high] =
        std::minmax_element(placement.drive_bytes.begin(), placement.drive_bytes.end());
    EXPECT_LE(*high - *low, 10);
  }
  // What Eq. 7 is for: with a fixed start, small clusters pile up on the first drives.
  int64_t p_global = 0;
  const Placement fixed =
      place(clusters_of(std::vector<int64_t>(50, 1)), 10, 7, "fixed_start", p_global);
  EXPECT_EQ(fixed.drive_bytes[0], 500);
}

TEST(Placement, OneDriveHoldsEverything) {
  int64_t p_global = 0;
  for (const std::string& name : placement_names()) {
    const Placement placement = place(clusters_of({2, 3}), 4096, 1, name, p_global);
    EXPECT_EQ(placement.drive_bytes, (std::vector<int64_t>{5 * 4096}));
  }
}

TEST(Placement, NoClusters) {
  int64_t p_global = 3;
  const Placement placement = place(Clusters{}, 1, 2, "round_robin", p_global);
  EXPECT_TRUE(placement.copies.empty());
  EXPECT_EQ(placement.drive_bytes, (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(p_global, 3);
}

TEST(Placement, BadArgumentsLeaveTheTurnAlone) {
  const Clusters clusters = clusters_of({2, 3});
  int64_t p_global = 11;
  const int64_t huge = std::numeric_limits<int64_t>::max();
  for (const auto& [entry_bytes, drives] :
       {std::pair<int64_t, int64_t>{0, 2}, {-1, 2}, {huge, 2}, {1, 0}, {1, -3}}) {
    EXPECT_THROW(place(clusters, entry_bytes, drives, "round_robin", p_global), Error);
  }
  EXPECT_EQ(p_global, 11);
  int64_t negative = -1;
  EXPECT_THROW(place(clusters, 1, 2, "round_robin", negative), Error);
  try {
    place(clusters, 1, 2, "raid0", p_global);
    FAIL() << "no exception";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kArgument);
    for (const std::string& name : placement_names()) {
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
  }
  EXPECT_EQ(p_global, 11);
}

}  // namespace
}  // namespace swarm_kv
