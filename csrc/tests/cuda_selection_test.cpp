// Selections on the emulated GPU are those of the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cuda_rig.h"
#include "ops/cpu/selection.h"
#include "ops/cuda/selection.h"

namespace swarm_kv::cuda {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Case {
  int64_t entries;
  std::vector<int32_t> offsets, members;

  int64_t count() const { return std::ssize(offsets) - 1; }
  ClusterLists lists() const { return {offsets.data(), members.data(), count(), entries}; }
};

// Clusters of any size, empty ones too, that share entries; some entries lie in none.
Case random_case(Generator& random) {
  Case c;
  c.entries = random.one_of({1, 2, 31, 64, 100, 300});
  c.offsets = {0};
  const int64_t count = random.one_of({0, 1, 2, 5, 40, 300});
  const int64_t largest = random.one_of({1, 4, 16});
  for (int64_t i = 0; i < count; ++i) {
    const int64_t size = random.integer(0, largest), first = random.integer(0, c.entries - 1);
    for (int64_t j = 0; j < size; ++j) {
      // Neighbours, or any entry: also one that the cluster has already.
      const int64_t entry =
          random.chance(0.7) ? (first + j) % c.entries : random.integer(0, c.entries - 1);
      c.members.push_back(static_cast<int32_t>(entry));
    }
    c.offsets.push_back(static_cast<int32_t>(c.members.size()));
  }
  // Loose members, which no cluster has.
  for (int64_t i = random.integer(0, 5); i > 0; --i) c.members.push_back(0);
  return c;
}

std::vector<int64_t> gpu_clusters(const Case& c, const std::vector<float>& scores, int64_t budget) {
  std::vector<int64_t> ids(c.count());
  Selected selected{-1, -1, -1};
  const Scratch scratch(select_clusters_scratch(c.lists()));
  EXPECT_EQ(select_clusters(scores.data(), c.lists(), budget, ids.data(), &selected, scratch.get(),
                            nullptr),
            cudaSuccess);
  ids.resize(selected.clusters);
  return ids;
}

TEST(CudaSelection, ClustersAreTakenAsOnTheCpu) {
  for (unsigned seed = 0; seed < kCases; ++seed) {
    Generator random(seed);
    const Case c = random_case(random);
    std::vector<float> scores = random.normal(c.count());
    if (random.chance(0.3)) {  // ties, zeros of both signs
      for (float& score : scores) score = std::trunc(2 * score) * (random.chance(0.5) ? 1 : -1);
    }
    if (random.chance(0.1)) scores.assign(c.count(), -kInfinity);
    for (int64_t budget : {int64_t{0}, int64_t{1}, random.integer(0, c.entries), c.entries + 9}) {
      EXPECT_EQ(gpu_clusters(c, scores, budget),
                cpu::select_clusters(scores.data(), c.lists(), budget))
          << "seed " << seed << ", budget " << budget << " of " << c.entries << " entries, "
          << c.count() << " clusters";
    }
    if (HasFailure()) return;
  }
}

TEST(CudaSelection, OneOtherScoreShows) {
  Generator random(2);
  Case c = random_case(random);
  while (c.count() < 40) c = random_case(random);
  std::vector<float> scores = random.normal(c.count());
  const std::vector<int64_t> wanted = cpu::select_clusters(scores.data(), c.lists(), c.entries);
  scores[wanted.front()] = -9;
  EXPECT_NE(gpu_clusters(c, scores, c.entries), wanted);
}

cpu::TwoLevelSelection gpu_two_level(const Case& c, const TwoLevel& call, int rounds_at_a_time) {
  cpu::TwoLevelSelection result;
  result.clusters.resize(c.count());
  result.entries.resize(call.budget);
  Selected selected{-1, -1, -1};
  int32_t open = 1;
  const Scratch scratch(select_two_level_scratch(c.lists()));
  for (int64_t i = 0; open > 0; ++i) {
    if (i > c.count()) {
      ADD_FAILURE() << open << " clusters stay open";
      break;
    }
    EXPECT_EQ(settle_gains(call, i == 0, rounds_at_a_time, &open, scratch.get(), nullptr),
              cudaSuccess);
  }
  EXPECT_EQ(take_two_level(call, result.clusters.data(), result.entries.data(), &selected,
                           scratch.get(), nullptr),
            cudaSuccess);
  result.clusters.resize(selected.clusters);
  result.entries.resize(selected.entries);
  return result;
}

TEST(CudaSelection, TwoLevelsAreTakenAsOnTheCpu) {
  int clusters = 0, entries = 0;
  for (unsigned seed = 0; seed < kCases; ++seed) {
    Generator random(seed);
    const Case c = random_case(random);
    std::vector<float> probs = random.normal(c.entries);
    for (float& prob : probs) prob = random.chance(0.1) ? 0 : std::exp(prob);
    if (random.chance(0.3)) {  // ties
      for (float& prob : probs) prob = std::trunc(prob);
    }
    const TwoLevel call{
        probs.data(), c.lists(), random.integer(0, c.entries - 1),
        static_cast<double>(random.integer(0, 4)),
        random.chance(0.2) ? 1.0 : 0.25 * static_cast<double>(random.integer(0, 3))};
    const cpu::TwoLevelSelection got = gpu_two_level(c, call, seed % 2 == 0 ? 1 : 3);
    const cpu::TwoLevelSelection wanted = cpu::select_two_level(
        call.probs, call.clusters, call.budget, call.request_cost, call.single_share);
    EXPECT_EQ(got.clusters, wanted.clusters);
    EXPECT_EQ(got.entries, wanted.entries);
    clusters += wanted.clusters.size() > 3;
    entries += wanted.entries.size() > 3;
    if (HasFailure()) FAIL() << "seed " << seed;
  }
  EXPECT_GT(clusters, static_cast<int>(kCases) / 10);
  EXPECT_GT(entries, static_cast<int>(kCases) / 10);
}

// Each cluster shares an entry with the next one, and gains grow along the chain: one is settled
// per round.
TEST(CudaSelection, AChainIsSettledInTheEnd) {
  Generator random(0);
  Case c;
  c.entries = 41;
  c.offsets = {0};
  std::vector<float> probs = {1};
  for (int32_t i = 0; i < 40; ++i) {
    c.members.insert(c.members.end(), {i, i + 1});
    c.offsets.push_back(2 * (i + 1));
    probs.push_back(probs.back() + 1);
  }
  const TwoLevel call{probs.data(), c.lists(), 40, 1.5, 0.0};
  EXPECT_EQ(gpu_two_level(c, call, 1).clusters,
            cpu::select_two_level(call.probs, call.clusters, 40, 1.5, 0.0).clusters);
}

TEST(CudaSelection, FactsOfListsAreFound) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Generator random(seed);
    Case c = random_case(random);
    std::vector<float> values = random.normal(random.one_of({0, 1, 3000}));
    const int64_t total = std::ssize(c.members);
    ListFacts facts;
    const auto inspect = [&] {
      ASSERT_EQ(inspect_lists(values.data(), std::ssize(values), c.offsets.data(), c.count(),
                              c.members.data(), total, &facts, nullptr),
                cudaSuccess);
    };
    inspect();
    EXPECT_EQ(facts.first_offset, 0);
    EXPECT_EQ(facts.last_offset, c.offsets.back());
    EXPECT_EQ(facts.least_member, 0);
    EXPECT_EQ(facts.greatest_member,
              total == 0 ? -1 : *std::max_element(c.members.begin(), c.members.end()));
    EXPECT_EQ(facts.decreases, 0);
    EXPECT_EQ(facts.nan, 0);
    if (total == 0 || values.empty() || c.offsets.back() == 0) continue;
    c.members[random.integer(0, total - 1)] = -3;
    values[random.integer(0, std::ssize(values) - 1)] = NAN;
    c.offsets[random.integer(0, c.count() - 1)] = c.offsets.back() + 1;
    inspect();
    EXPECT_EQ(facts.least_member, -3);
    EXPECT_EQ(facts.decreases, 1);
    EXPECT_EQ(facts.nan, 1);
  }
}

}  // namespace
}  // namespace swarm_kv::cuda
