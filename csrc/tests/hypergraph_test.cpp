#include "core/hypergraph.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bitset>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "core/bisection.h"
#include "core/parallel.h"
#include "io/error.h"

namespace swarm_kv {
namespace {

struct Signatures {
  Signatures(int64_t num_entries, int64_t num_words)
      : entries(num_entries), words(num_words), bits(num_entries * num_words, 0) {}

  void set(int64_t entry, int64_t query) {
    bits[entry * words + query / 64] |= static_cast<int64_t>(uint64_t{1} << (query % 64));
  }
  bool has(int64_t entry, int64_t query) const {
    return (bits[entry * words + query / 64] >> (query % 64) & 1) != 0;
  }
  const uint64_t* rows() const { return reinterpret_cast<const uint64_t*>(bits.data()); }
  int64_t common(int64_t i, int64_t j) const {
    size_t sum = 0;
    for (int64_t w = 0; w < words; ++w) {
      const int64_t both = bits[i * words + w] & bits[j * words + w];
      sum += std::bitset<64>(static_cast<uint64_t>(both)).count();
    }
    return static_cast<int64_t>(sum);
  }

  int64_t entries;
  int64_t words;
  std::vector<int64_t> bits;
};

// Entry i belongs to group i % groups: members of a group are as far from each other as can be. A
// query activates `active` groups, each member with a probability of 0.9, and others by chance.
Signatures scattered_groups(uint32_t seed, int64_t groups, int64_t size, int64_t words,
                            int64_t active, double noise) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform;
  Signatures result(groups * size, words);
  for (int64_t query = 0; query < words * 64; ++query) {
    std::set<int64_t> chosen;
    while (static_cast<int64_t>(chosen.size()) < active) chosen.insert(random() % groups);
    for (int64_t i = 0; i < result.entries; ++i) {
      const bool wanted = chosen.count(i % groups) > 0;
      if (uniform(random) < (wanted ? 0.9 : noise)) result.set(i, query);
    }
  }
  return result;
}

Clusters cluster(const Signatures& s, const ClusterOptions& options) {
  return hypergraph_clusters(s.bits.data(), s.entries, s.words, options);
}

bool same(const Clusters& a, const Clusters& b) {
  return a.offsets == b.offsets && a.members == b.members;
}

// Pieces of `order`, ending at `ends`, that a query has to read on average.
double mean_reads(const Signatures& s, const std::vector<int32_t>& order,
                  const std::vector<int64_t>& ends) {
  int64_t reads = 0;
  for (int64_t query = 0; query < s.words * 64; ++query) {
    int64_t begin = 0;
    for (const int64_t end : ends) {
      reads += std::any_of(order.begin() + begin, order.begin() + end,
                           [&](int32_t entry) { return s.has(entry, query); });
      begin = end;
    }
  }
  return static_cast<double>(reads) / static_cast<double>(s.words * 64);
}

std::vector<int32_t> sequence(int64_t entries) {
  std::vector<int32_t> order(entries);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

TEST(Bisection, FindsScatteredGroups) {
  const Signatures s = scattered_groups(1, 32, 16, 4, 4, 0.0);
  std::vector<int32_t> order = sequence(s.entries);
  const std::vector<int64_t> ends = bisect(s.rows(), s.words, 16, order);
  ASSERT_EQ(ends.size(), 32u);
  EXPECT_LT(mean_reads(s, order, ends), 6.0);
  // In sequence every block holds half of the groups.
  EXPECT_GT(mean_reads(s, sequence(s.entries), ends), 25.0);
}

TEST(Bisection, LeavesOfOneParentAreWantedTogether) {
  // Groups of 32 in leaves of 8: a group's leaves have to be neighbours.
  const Signatures s = scattered_groups(2, 16, 32, 4, 2, 0.0);
  std::vector<int32_t> order = sequence(s.entries);
  bisect(s.rows(), s.words, 8, order);
  int64_t together = 0;
  for (size_t i = 1; i < order.size(); ++i) together += order[i] % 16 == order[i - 1] % 16;
  EXPECT_GT(together, 430);
  EXPECT_LT(together, s.entries);
}

TEST(Bisection, CutsAnyNumberIntoFullLeaves) {
  for (const int64_t entries : {0, 1, 2, 3, 7, 16, 17, 100, 255}) {
    Signatures s(entries, 2);
    std::mt19937 random(entries);
    for (int64_t i = 0; i < 10 * entries; ++i) s.set(random() % entries, random() % 128);
    for (const int64_t max_leaf : {1, 2, 5, 16, 1000}) {
      std::vector<int32_t> order = sequence(entries);
      const std::vector<int64_t> ends = bisect(s.rows(), s.words, max_leaf, order);
      EXPECT_EQ(static_cast<int64_t>(ends.size()), (entries + max_leaf - 1) / max_leaf);
      EXPECT_EQ(ends.empty() ? 0 : ends.back(), entries);
      for (size_t i = 0; i < ends.size(); ++i) {
        const int64_t size = ends[i] - (i > 0 ? ends[i - 1] : 0);
        EXPECT_GE(size, 1);
        EXPECT_LE(size, max_leaf);
      }
      std::sort(order.begin(), order.end());
      EXPECT_EQ(order, sequence(entries));
    }
  }
}

TEST(Bisection, NothingToGainKeepsTheSequence) {
  Signatures nothing(50, 1);
  Signatures everything(50, 1);
  for (int64_t i = 0; i < 50; ++i) everything.set(i, 3);
  for (const Signatures* s : {&nothing, &everything}) {
    std::vector<int32_t> order = sequence(50);
    bisect(s->rows(), s->words, 8, order);
    EXPECT_EQ(order, sequence(50));
  }
  std::vector<int32_t> order = sequence(5);
  EXPECT_EQ(bisect(nullptr, 0, 3, order).size(), 2u);
}

TEST(Hypergraph, ThreadCountDoesNotMatter) {
  const int threads = num_threads();
  const Signatures s = scattered_groups(3, 60, 50, 3, 5, 0.02);
  const ClusterOptions options{.max_size = 32};
  set_num_threads(1);
  const Clusters expected = cluster(s, options);
  for (const int other : {2, 5}) {
    set_num_threads(other);
    EXPECT_TRUE(same(cluster(s, options), expected)) << other;
  }
  set_num_threads(threads);
}

TEST(Hypergraph, EveryEntryHasOnePlace) {
  const Signatures s = scattered_groups(4, 20, 19, 2, 3, 0.05);
  for (const int64_t max_size : {1, 2, 7, 16, 64}) {
    Clusters clusters = cluster(s, {.max_size = max_size});
    for (int64_t c = 0; c < clusters.count(); ++c) {
      EXPECT_GE(clusters.size(c), 2);
      EXPECT_LE(clusters.size(c), max_size);
    }
    EXPECT_EQ(clusters.loose(), max_size == 1 ? s.entries : 0);
    std::sort(clusters.members.begin(), clusters.members.end());
    EXPECT_EQ(clusters.members, sequence(s.entries));
  }
}

TEST(Hypergraph, MedoidComesFirst) {
  const Signatures s = scattered_groups(5, 8, 16, 2, 2, 0.05);
  const Clusters clusters = cluster(s, {.max_size = 16});
  const auto distance_to_all = [&](int64_t c, int64_t i) {
    double sum = 0.0;
    for (int64_t j = clusters.offsets[c]; j < clusters.offsets[c + 1]; ++j) {
      const int64_t other = clusters.members[j];
      const auto shared = static_cast<double>(s.common(i, other));
      sum += 1.0 - shared / (static_cast<double>(s.common(i, i) + s.common(other, other)) - shared);
    }
    return sum;
  };
  ASSERT_EQ(clusters.count(), 8);
  int64_t second_is_worse = 0;
  for (int64_t c = 0; c < clusters.count(); ++c) {
    const double best = distance_to_all(c, clusters.medoid(c));
    for (int64_t j = clusters.offsets[c]; j < clusters.offsets[c + 1]; ++j) {
      EXPECT_LE(best, distance_to_all(c, clusters.members[j]) + 1e-9);
    }
    second_is_worse += distance_to_all(c, clusters.members[clusters.offsets[c] + 1]) > best;
  }
  EXPECT_GT(second_is_worse, 0);
}

TEST(Hypergraph, ColdEntriesGoWhereAsked) {
  Signatures s = scattered_groups(6, 4, 8, 2, 1, 0.0);
  for (const int64_t cold : {3, 4, 20, 31}) {
    std::fill_n(s.bits.begin() + cold * s.words, s.words, 0);
  }
  ClusterOptions options{.max_size = 8, .block = 3};
  const Clusters coded = cluster(s, options);
  EXPECT_EQ(coded.loose(), 4);
  EXPECT_EQ((std::vector<int32_t>{coded.members.end() - 4, coded.members.end()}),
            (std::vector<int32_t>{3, 4, 20, 31}));
  options.cold = "packed";
  const Clusters packed = cluster(s, options);
  EXPECT_EQ(packed.members, coded.members);
  EXPECT_EQ(packed.count(), coded.count() + 2);
  EXPECT_EQ(packed.loose(), 0);
  options.cold = "single";
  EXPECT_EQ(cluster(s, options).count(), coded.count() + 4);
}

TEST(Hypergraph, SmallIndexKeepsTheHottest) {
  // Group 0 is wanted by every query, group 1 by half of them, group 2 by a quarter.
  Signatures s(12, 2);
  for (int64_t query = 0; query < 128; ++query) {
    for (int64_t i = 0; i < 12; ++i) {
      if (query % (int64_t{1} << (i / 4)) == 0) s.set(i, query);
    }
  }
  ClusterOptions options{.max_size = 4};
  ASSERT_EQ(cluster(s, options).count(), 3);
  options.max_index_bytes = 2 * index_bytes(1, 4);
  const Clusters two = cluster(s, options);
  EXPECT_EQ(two.count(), 2);
  EXPECT_EQ((std::vector<int32_t>{two.members.end() - 4, two.members.end()}),
            (std::vector<int32_t>{8, 9, 10, 11}));
  --options.max_index_bytes;
  EXPECT_EQ(cluster(s, options).count(), 1);
}

TEST(Hypergraph, RejectsBadOptions) {
  const Signatures s(4, 1);
  for (const ClusterOptions& options :
       {ClusterOptions{.distance = "euclid"}, ClusterOptions{.tau = 1.1},
        ClusterOptions{.max_size = 0}, ClusterOptions{.max_replicas = 0},
        ClusterOptions{.min_activation = 0}, ClusterOptions{.cold = "warm"},
        ClusterOptions{.block = 0}, ClusterOptions{.max_index_bytes = -1}}) {
    EXPECT_THROW(cluster(s, options), Error);
  }
  EXPECT_EQ(cluster(s, {}).loose(), 4);
  EXPECT_EQ(cluster(Signatures(0, 1), {}).members.size(), 0u);
  EXPECT_EQ(cluster(Signatures(5, 0), {}).loose(), 5);
}

}  // namespace
}  // namespace swarm_kv
