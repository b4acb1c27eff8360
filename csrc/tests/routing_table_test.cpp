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

// Every entry in one cluster, and some again in others; the last fifth is loose.
Clusters random_clusters(std::mt19937& random, int64_t num_entries) {
  std::vector<int64_t> order(num_entries);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  Clusters clusters;
  const size_t clustered = order.size() - order.size() / 5;
  for (size_t i = 0; i < clustered;) {
    const size_t first = clusters.members.size();
    for (size_t end = std::min(clustered, i + 1 + random() % 9); i < end; ++i) {
      clusters.members.push_back(order[i]);
    }
    for (int extra = 0; extra < 3; ++extra) {
      const int64_t entry = order[random() % clustered];
      const auto begin = clusters.members.begin() + static_cast<int64_t>(first);
      if (std::find(begin, clusters.members.end(), entry) == clusters.members.end()) {
        clusters.members.push_back(entry);
      }
    }
    clusters.offsets.push_back(clusters.members.size());
  }
  clusters.members.insert(clusters.members.end(), order.begin() + clustered, order.end());
  return clusters;
}

Clusters make_clusters(uint32_t seed, int64_t num_entries) {
  std::mt19937 random(seed);
  return random_clusters(random, num_entries);
}

TEST(RoutingTable, FindsEveryCopyOnce) {
  for (uint32_t seed = 0; seed < 30; ++seed) {
    const int64_t num_entries = 1 + seed * 7;
    const Clusters clusters = make_clusters(seed, num_entries);
    const RoutingTable table(clusters, num_entries);
    std::map<int64_t, std::vector<int32_t>> expected;
    for (size_t p = 0; p < clusters.members.size(); ++p) {
      expected[clusters.members[p]].push_back(static_cast<int32_t>(p));
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
  const Clusters clusters = make_clusters(1, 1000);
  const RoutingTable table(clusters, 1000);
  const size_t arrays = 4 * (1001 + clusters.members.size());
  EXPECT_GE(table.bytes(), arrays);
  EXPECT_LE(table.bytes(), arrays + 128);
}

TEST(RoutingTable, NoEntries) {
  const RoutingTable table(Clusters{}, 0);
  EXPECT_EQ(table.num_entries(), 0);
  EXPECT_THROW(table.copies_of(0), Error);
}

TEST(RoutingTable, RejectsAnUnknownEntry) {
  const Clusters clusters = make_clusters(2, 10);
  const RoutingTable table(clusters, 10);
  EXPECT_THROW(table.copies_of(-1), Error);
  EXPECT_THROW(table.copies_of(10), Error);
}

// Each way in which clusters can contradict themselves is noticed, with its own message.
TEST(RoutingTable, RejectsContradictions) {
  const Clusters good = make_clusters(3, 50);
  ASSERT_EQ(good.loose(), 10);
  EXPECT_NO_THROW(RoutingTable(good, 50));
  const auto expect_error = [&](const std::string& part,
                                const std::function<void(Clusters&)>& spoil,
                                int64_t num_entries = 50) {
    Clusters bad = good;
    spoil(bad);
    try {
      RoutingTable table(bad, num_entries);
      ADD_FAILURE() << "accepted: " << part;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kArgument);
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  expect_error("offsets", [](Clusters& c) { c.members.resize(c.offsets.back() - 1); });
  expect_error("offsets", [](Clusters& c) { c.offsets.clear(); });
  expect_error("is empty", [](Clusters& c) { c.offsets[2] = c.offsets[1]; });
  expect_error("is empty", [](Clusters& c) { c.offsets[2] = 1000; });
  expect_error("is not in [0, 50)", [](Clusters& c) { c.members[4] = 50; });
  expect_error("is not in [0, 50)", [](Clusters& c) { c.members[4] = -1; });
  expect_error("of the loose entries is not in [0, 50)",
               [](Clusters& c) { c.members.back() = 50; });
  expect_error("is in no cluster and not loose", [](Clusters& c) { c.members.pop_back(); });
  expect_error("is in no cluster and not loose", [](Clusters&) {}, 51);
  expect_error("num_entries", [](Clusters&) {}, -1);
  expect_error("has another copy", [](Clusters& c) { c.members.push_back(c.members.back()); });
  expect_error("has another copy", [](Clusters& c) { c.members.back() = c.members.front(); });
  expect_error("twice", [](Clusters& c) {
    c.members[c.offsets[1]] = c.members[c.offsets[2] - 1];
    ASSERT_GT(c.size(1), 1);
  });
}

}  // namespace
}  // namespace swarm_kv
