#include "core/maintain.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>

#include "io/error.h"

namespace swarm_kv {
namespace {

using Rows = std::vector<std::vector<int64_t>>;

Rows rows_of(const Homes& homes) {
  Rows rows;
  for (size_t i = 0; i + 1 < homes.rows.size(); ++i) {
    rows.emplace_back(homes.homes.begin() + homes.rows[i], homes.homes.begin() + homes.rows[i + 1]);
  }
  return rows;
}

Rows join(const std::vector<int64_t>& bits, const std::vector<int64_t>& medoids,
          const JoinOptions& options, int64_t words = 1) {
  return rows_of(join_clusters(bits.data(), std::ssize(bits) / words, medoids.data(),
                               std::ssize(medoids) / words, words, options));
}

TEST(JoinClusters, NearestAndAllBelowTheRadius) {
  // Jaccard distances of 0b1111 to the medoids: 0, 1/2, 3/4, 1.
  const std::vector<int64_t> medoids{0b1111, 0b0011, 0b1000, 0b110000};
  EXPECT_EQ(join({0b1111}, medoids, {.tau = 0.6}), (Rows{{0, 1}}));
  EXPECT_EQ(join({0b1111}, medoids, {.tau = 0.8}), (Rows{{0, 1, 2}}));
  // Strictly below.
  EXPECT_EQ(join({0b1111}, medoids, {.tau = 0.5}), (Rows{{0}}));
  // The nearest however far, but none without a common step.
  EXPECT_EQ(join({0b1001000}, medoids, {.tau = 0.1}), (Rows{{2}}));
  EXPECT_EQ(join({0b1000000, 0}, medoids, {.tau = 1.0}), (Rows{{}, {}}));
}

TEST(JoinClusters, ReplicasAreCappedAndTiesGoToTheLowerCluster) {
  const std::vector<int64_t> medoids{0b01, 0b11, 0b11, 0b11};
  EXPECT_EQ(join({0b11}, medoids, {.tau = 0.9, .max_replicas = 2}), (Rows{{1, 2}}));
  EXPECT_EQ(join({0b11}, medoids, {.tau = 0.9, .max_replicas = 9}), (Rows{{1, 2, 3, 0}}));
}

TEST(JoinClusters, AsPrintedWhatIsActiveMostIsNearestToEverything) {
  const std::vector<int64_t> medoids{-1, 0b0111};
  EXPECT_EQ(join({0b1111}, medoids, {.distance = "global", .tau = 0.0, .steps = 64}), (Rows{{0}}));
  EXPECT_EQ(join({0b1111}, medoids, {.distance = "jaccard", .tau = 0.0, .steps = 64}), (Rows{{1}}));
  // 1 - f / W: 4 of 8 steps.
  EXPECT_EQ(join({0b1111}, {0b1111, 0b11}, {.distance = "global", .tau = 0.51, .steps = 8}),
            (Rows{{0}}));
  EXPECT_EQ(join({0b1111}, {0b1111, 0b11}, {.distance = "global", .tau = 0.76, .steps = 8}),
            (Rows{{0, 1}}));
}

TEST(JoinClusters, AgreesWithTheEquationOnRandomBits) {
  std::mt19937_64 random(7);
  for (const char* name : {"jaccard", "conditional", "global"}) {
    for (const int64_t words : {1, 4}) {
      std::vector<int64_t> bits(40 * words), medoids(30 * words);
      for (auto* list : {&bits, &medoids}) {
        for (int64_t& word : *list) word = random() & random();
      }
      const JoinOptions options{
          .distance = name, .tau = 0.7, .steps = words * 64, .max_replicas = 3};
      const Rows joined = join(bits, medoids, options, words);
      for (int64_t i = 0; i < 40; ++i) {
        std::vector<std::pair<double, int64_t>> near;
        for (int64_t c = 0; c < 30; ++c) {
          int64_t common = 0, own = 0, other = 0;
          for (int64_t w = 0; w < words; ++w) {
            const uint64_t a = bits[i * words + w], b = medoids[c * words + w];
            common += std::popcount(a & b);
            own += std::popcount(a);
            other += std::popcount(b);
          }
          const double whole = name[0] == 'g'   ? options.steps
                               : name[0] == 'j' ? own + other - common
                                                : std::min(own, other);
          if (common > 0) near.emplace_back(1 - common / whole, c);
        }
        std::sort(near.begin(), near.end());
        std::vector<int64_t> expected;
        for (const auto& [d, c] : near) {
          if ((expected.empty() || d < options.tau) && expected.size() < 3) expected.push_back(c);
        }
        EXPECT_EQ(joined[i], expected) << name << " entry " << i;
      }
    }
  }
}

TEST(JoinClusters, NothingToJoinAndNobodyThatJoins) {
  EXPECT_EQ(join({}, {1, 2}, {}), Rows{});
  EXPECT_EQ(join({1, 2}, {}, {}), (Rows{{}, {}}));
}

TEST(JoinClusters, RefusesOptionsOutsideTheirLimits) {
  const auto message = [](const JoinOptions& options) -> std::string {
    try {
      join({1}, {1}, options);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message({.tau = 1.5}).find("join_clusters: tau must be in [0, 1]"), 0u);
  EXPECT_EQ(message({.tau = std::nan("")}).find("join_clusters: tau"), 0u);
  EXPECT_EQ(message({.steps = 0}).find("join_clusters: steps must be at least 1"), 0u);
  EXPECT_EQ(message({.max_replicas = 0}).find("join_clusters: max_replicas must be"), 0u);
  EXPECT_NE(message({.distance = "cosine"}).find("jaccard"), std::string::npos);
  EXPECT_EQ(message({}), "");
}

}  // namespace
}  // namespace swarm_kv
