#include "core/tier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "io/error.h"

namespace swarm_kv {
namespace {

// Clusters, then loose entries; each cluster on one drive, drives in turn.
Segment segment_of(const std::vector<std::vector<int32_t>>& lists, std::vector<int32_t> loose,
                   int64_t entries, size_t drives, const std::string& placement = "sequential") {
  Clusters clusters;
  for (const auto& list : lists) {
    clusters.members.insert(clusters.members.end(), list.begin(), list.end());
    clusters.offsets.push_back(clusters.members.size());
  }
  clusters.members.insert(clusters.members.end(), loose.begin(), loose.end());
  Turn turn;
  Placement placed = place(clusters, std::vector<double>(drives, 1), placement, turn);
  RoutingTable routing(clusters, entries);
  return Segment{.id = 1,
                 .label = "x",
                 .entries = entries,
                 .entry_bytes = 1000,
                 .clusters = clusters,
                 .placement = placed,
                 .routing = routing,
                 .drive_offset = {},
                 .checksum = {},
                 .residency = {}};
}

TEST(Tier, ScoresFollowEquation6) {
  const TierCandidate candidate{30, 4, 2e-5, 5e-6};
  EXPECT_DOUBLE_EQ(make_tier_score("printed")->score(candidate), (30 * 2e-5 + 4 * 5e-6) / 4);
  EXPECT_DOUBLE_EQ(make_tier_score("product")->score(candidate), 30 * (2e-5 + 4 * 5e-6) / 4);
  EXPECT_EQ(make_tier_score("none"), nullptr);
  try {
    make_tier_score("best");
    FAIL() << "no exception";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("printed, product, none"), std::string::npos);
  }
}

TEST(Tier, EntriesComeOnceByDescendingScore) {
  // Mean counts 4 (of 0, 1, 2) and 9 (of 2, 3); loose 4 counts 5, loose 5 counts 0.
  const Segment segment = segment_of({{0, 1, 2}, {2, 3}}, {4, 5}, 6, 1);
  const std::vector<int32_t> activations = {1, 1, 10, 8, 5, 0};
  const std::vector<DriveShape> drives = {{{1e-5, 1e-12}, 512}};
  // f/s: 4/3, 9/2, 5, 0.
  EXPECT_EQ(tier_order(segment, activations, drives, *make_tier_score("printed")),
            (std::vector<int32_t>{4, 2, 3, 0, 1, 5}));
  // Where transfers cost most, f alone: 4, 9, 5, 0.
  const std::vector<DriveShape> slow = {{{1e-12, 1e-5}, 512}};
  EXPECT_EQ(tier_order(segment, activations, slow, *make_tier_score("product")),
            (std::vector<int32_t>{2, 3, 4, 0, 1, 5}));
  // ... which Eq. 6 as printed does not see: all clusters have the same score, up to f/s.
  EXPECT_EQ(tier_order(segment, activations, slow, *make_tier_score("printed")),
            (std::vector<int32_t>{4, 2, 3, 0, 1, 5}));
}

TEST(Tier, TimesAreMeansOverTheDrivesThatHoldACluster) {
  // Equal counts and sizes: what lies on the slow drive is worth more.
  const std::vector<int32_t> activations(6, 7);
  const std::vector<DriveShape> drives = {{{1e-5, 1e-9}, 512}, {{9e-5, 9e-9}, 512}};
  const Segment apart = segment_of({{1, 0}, {3, 2}, {5, 4}}, {}, 6, 2);
  EXPECT_EQ(tier_order(apart, activations, drives, *make_tier_score("printed")),
            (std::vector<int32_t>{3, 2, 1, 0, 5, 4}));
  const Segment striped = segment_of({{1, 0}, {3, 2}, {5, 4}}, {}, 6, 2, "round_robin");
  EXPECT_EQ(tier_order(striped, activations, drives, *make_tier_score("printed")),
            (std::vector<int32_t>{1, 0, 3, 2, 5, 4}));
}

TEST(Tier, AProfileThatDoesNotFitIsRefused) {
  std::vector<int32_t> activations = {0, 3, 4};
  const auto message = [&](int64_t queries, int64_t entries) -> std::string {
    try {
      InitialFill{"printed", activations, queries}.check(entries);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kArgument);
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message(4, 3), "");
  EXPECT_NE(message(4, 5).find("3 entries, but 5"), std::string::npos);
  EXPECT_NE(message(3, 3).find("entry 2 was activated 4 times by 3"), std::string::npos);
  EXPECT_NE(message(0, 3).find("`profile_queries` is 0"), std::string::npos);
  activations[0] = -1;
  EXPECT_NE(message(4, 3).find("entry 0 was activated -1 times"), std::string::npos);
}

}  // namespace
}  // namespace swarm_kv
