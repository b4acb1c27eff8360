#include "core/routing_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <random>

#include "io/error.h"

namespace swarm_kv {
namespace {

// Every entry in one cluster, and some again in others.
Clusters random_clusters(std::mt19937& random, int64_t num_entries) {
  std::vector<int64_t> order(num_entries);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  Clusters clusters;
  for (size_t i = 0; i < order.size();) {
    const size_t first = clusters.members.size();
    for (size_t end = std::min(order.size(), i + 1 + random() % 9); i < end; ++i) {
      clusters.members.push_back(order[i]);
    }
    for (int extra = 0; extra < 3; ++extra) {
      const int64_t entry = static_cast<int64_t>(random() % num_entries);
      const auto begin = clusters.members.begin() + static_cast<int64_t>(first);
      if (std::find(begin, clusters.members.end(), entry) == clusters.members.end()) {
        clusters.members.push_back(entry);
      }
    }
    clusters.offsets.push_back(static_cast<int64_t>(clusters.members.size()));
  }
  return clusters;
}

struct Case {
  Clusters clusters;
  Placement placement;
};

Case make_case(uint32_t seed, int64_t num_entries) {
  std::mt19937 random(seed);
  Case result{random_clusters(random, num_entries), {}};
  int64_t p_global = 0;
  result.placement = place(result.clusters, 512, 3, "round_robin", p_global);
  return result;
}

TEST(RoutingTable, FindsEveryCopyOnce) {
  for (uint32_t seed = 0; seed < 30; ++seed) {
    const int64_t num_entries = 1 + seed * 7;
    const Case c = make_case(seed, num_entries);
    const RoutingTable table(c.clusters, c.placement, num_entries);
    std::map<int64_t, std::vector<int32_t>> expected;
    for (size_t p = 0; p < c.clusters.members.size(); ++p) {
      expected[c.clusters.members[p]].push_back(static_cast<int32_t>(p));
    }
    ASSERT_EQ(table.num_entries(), num_entries);
    size_t replicated = 0;
    for (int64_t entry = 0; entry < num_entries; ++entry) {
      const auto copies = table.copies_of(entry);
      ASSERT_EQ(std::vector<int32_t>(copies.begin(), copies.end()), expected[entry]);
      replicated += copies.size() > 1;
    }
    EXPECT_TRUE(replicated > 0 || num_entries <= 20);
  }
}

TEST(RoutingTable, CountsItsMemory) {
  const Case c = make_case(1, 1000);
  const RoutingTable table(c.clusters, c.placement, 1000);
  const size_t arrays = 4 * (1001 + c.clusters.members.size());
  EXPECT_GE(table.bytes(), arrays);
  EXPECT_LE(table.bytes(), arrays + 128);
}

TEST(RoutingTable, NoEntries) {
  const RoutingTable table(Clusters{}, Placement{}, 0);
  EXPECT_EQ(table.num_entries(), 0);
  EXPECT_THROW(table.copies_of(0), Error);
}

TEST(RoutingTable, RejectsAnUnknownEntry) {
  const Case c = make_case(2, 10);
  const RoutingTable table(c.clusters, c.placement, 10);
  EXPECT_THROW(table.copies_of(-1), Error);
  EXPECT_THROW(table.copies_of(10), Error);
}

// Each way in which clusters and placement can contradict each other is noticed, with its own
// message.
TEST(RoutingTable, RejectsContradictions) {
  const Case good = make_case(3, 50);
  EXPECT_NO_THROW(RoutingTable(good.clusters, good.placement, 50));
  const auto expect_error = [&](const std::string& part, const std::function<void(Case&)>& spoil,
                                int64_t num_entries = 50) {
    Case bad = good;
    spoil(bad);
    try {
      RoutingTable table(bad.clusters, bad.placement, num_entries);
      ADD_FAILURE() << "accepted: " << part;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kArgument);
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  expect_error("copies", [](Case& c) { c.placement.copies.pop_back(); });
  expect_error("offsets", [](Case& c) { c.clusters.members.pop_back(); });
  expect_error("offsets", [](Case& c) { c.clusters.offsets.clear(); });
  expect_error("is empty", [](Case& c) { c.clusters.offsets[2] = c.clusters.offsets[1]; });
  expect_error("is empty", [](Case& c) { c.clusters.offsets[2] = 1000; });
  expect_error("is not in [0, 50)", [](Case& c) { c.clusters.members[4] = 50; });
  expect_error("is not in [0, 50)", [](Case& c) { c.clusters.members[4] = -1; });
  expect_error("names cluster", [](Case& c) { ++c.placement.copies[4].cluster; });
  expect_error("on drive 3 of 3", [](Case& c) { c.placement.copies[4].drive = 3; });
  expect_error("is in no cluster", [](Case&) {}, 51);
  expect_error("num_entries", [](Case&) {}, -1);
  expect_error("twice", [](Case& c) {
    c.clusters.members[c.clusters.offsets[1]] = c.clusters.members[c.clusters.offsets[2] - 1];
    ASSERT_GT(c.clusters.size(1), 1);
  });
}

}  // namespace
}  // namespace swarm_kv
