#include "core/clustering.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bitset>
#include <cmath>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/clusterer.h"
#include "core/parallel.h"
#include "io/error.h"

namespace swarm_kv {
namespace {

struct Signatures {
  int64_t entries = 0;
  int64_t words = 0;
  std::vector<int64_t> bits;

  void set(int64_t entry, int64_t query) {
    bits[entry * words + query / 64] |= static_cast<int64_t>(uint64_t{1} << (query % 64));
  }
  int64_t popcount(int64_t i) const { return common(i, i); }
  int64_t common(int64_t i, int64_t j) const {
    size_t sum = 0;
    for (int64_t w = 0; w < words; ++w) {
      const int64_t both = bits[i * words + w] & bits[j * words + w];
      sum += std::bitset<64>(static_cast<uint64_t>(both)).count();
    }
    return static_cast<int64_t>(sum);
  }
  double distance(int64_t i, int64_t j) const {
    const int64_t shared = common(i, j);
    return 1.0 -
           static_cast<double>(shared) / static_cast<double>(popcount(i) + popcount(j) - shared);
  }
};

Signatures empty_signatures(int64_t entries, int64_t words) {
  return {entries, words, std::vector<int64_t>(entries * words, 0)};
}

// Entries belong to topics; a query activates most entries of a few topics, and some others by
// chance.
Signatures topics(uint32_t seed, int64_t entries, int64_t words, int64_t count, double noise) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform;
  Signatures result = empty_signatures(entries, words);
  const int64_t queries = words * 64 - 3;
  std::vector<std::vector<bool>> active(count, std::vector<bool>(queries));
  for (auto& topic : active) {
    const double popularity = 0.05 + 0.4 * uniform(random);
    for (int64_t t = 0; t < queries; ++t) topic[t] = uniform(random) < popularity;
  }
  for (int64_t i = 0; i < entries; ++i) {
    const auto& topic = active[random() % count];
    const double loyalty = 0.4 + 0.6 * uniform(random);
    for (int64_t t = 0; t < queries; ++t) {
      if ((topic[t] && uniform(random) < loyalty) || uniform(random) < noise) result.set(i, t);
    }
  }
  return result;
}

Clusters cluster(const Signatures& signatures, const ClusterOptions& options) {
  return cluster_signatures(signatures.bits.data(), signatures.entries, signatures.words, options);
}

bool same(const Clusters& a, const Clusters& b) {
  return a.offsets == b.offsets && a.members == b.members;
}

// Algorithm 1 from its definition, with the full distance matrix.
Clusters reference(const Signatures& s, const ClusterOptions& options) {
  std::vector<int64_t> hot;
  for (int64_t i = 0; i < s.entries; ++i) {
    if (s.popcount(i) >= options.min_activation) hot.push_back(i);
  }
  std::vector<std::vector<double>> distance(s.entries, std::vector<double>(s.entries));
  std::vector<int64_t> density(s.entries, 0);
  for (const int64_t i : hot) {
    for (const int64_t j : hot) {
      if (i == j) continue;
      distance[i][j] = s.distance(i, j);
      density[i] += distance[i][j] <= options.tau;
    }
  }
  std::vector<int64_t> order = hot;
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return density[a] > density[b]; });
  std::vector<int64_t> copies(s.entries, 0);
  Clusters clusters;
  for (const int64_t medoid : order) {
    if (copies[medoid] > 0) continue;
    std::vector<int64_t> candidates;
    for (const int64_t j : hot) {
      if (j != medoid && distance[medoid][j] <= options.tau && copies[j] < options.max_replicas) {
        candidates.push_back(j);
      }
    }
    std::stable_sort(candidates.begin(), candidates.end(), [&](int64_t a, int64_t b) {
      return distance[medoid][a] < distance[medoid][b];
    });
    if (static_cast<int64_t>(candidates.size()) > kMaxGrowthCandidates) {
      candidates.resize(kMaxGrowthCandidates);
    }
    std::vector<int64_t> members = {medoid};
    for (const int64_t candidate : candidates) {
      if (static_cast<int64_t>(members.size()) >= options.max_size) break;
      double sum = 0.0;
      for (const int64_t member : members) sum += distance[candidate][member];
      if (sum <= options.tau * static_cast<double>(members.size())) members.push_back(candidate);
    }
    for (const int64_t member : members) {
      ++copies[member];
      clusters.members.push_back(member);
    }
    clusters.offsets.push_back(static_cast<int64_t>(clusters.members.size()));
  }
  for (int64_t i = 0; i < s.entries; ++i) {
    if (s.popcount(i) >= options.min_activation) continue;
    clusters.members.push_back(i);
    clusters.offsets.push_back(static_cast<int64_t>(clusters.members.size()));
  }
  return clusters;
}

// The first promise of cluster_signatures that `clusters` breaks, or "".
std::string violation(const Signatures& s, const ClusterOptions& options,
                      const Clusters& clusters) {
  if (clusters.offsets.front() != 0 ||
      clusters.offsets.back() != static_cast<int64_t>(clusters.members.size())) {
    return "offsets";
  }
  std::vector<int64_t> copies(s.entries, 0);
  int64_t last_cold = -1;
  for (int64_t c = 0; c < clusters.count(); ++c) {
    const int64_t size = clusters.size(c);
    if (size < 1 || size > options.max_size) return "size";
    const int64_t* members = clusters.members.data() + clusters.offsets[c];
    if (std::set<int64_t>(members, members + size).size() != static_cast<size_t>(size)) {
      return "an entry twice";
    }
    if (copies[members[0]] > 0) return "medoid covered before";
    if (s.popcount(members[0]) < options.min_activation) {
      if (size != 1) return "cold entry with company";
      if (members[0] <= last_cold) return "cold order";
      last_cold = members[0];
    } else if (last_cold >= 0) {
      return "hot after cold";
    }
    for (int64_t i = 0; i < size; ++i) {
      ++copies[members[i]];
      if (i == 0) continue;
      if (s.popcount(members[i]) < options.min_activation) return "cold member";
      if (s.distance(members[0], members[i]) > options.tau) return "member beyond tau";
      double sum = 0.0;
      for (int64_t j = 0; j < i; ++j) sum += s.distance(members[i], members[j]);
      if (sum / static_cast<double>(i) > options.tau + 1e-12) return "mean distance";
      if (i > 1 && s.distance(members[0], members[i]) < s.distance(members[0], members[i - 1])) {
        return "member order";
      }
    }
  }
  for (const int64_t count : copies) {
    if (count < 1) return "not covered";
    if (count > options.max_replicas) return "replicas";
  }
  return "";
}

const std::vector<ClusterOptions>& variants() {
  static const std::vector<ClusterOptions> kVariants = {
      {},
      {.tau = 0.6, .max_size = 64, .max_replicas = 3, .min_activation = 1},
      {.tau = 0.5, .max_size = 5, .max_replicas = 2, .min_activation = 4},
      {.tau = 0.75, .max_size = 9, .max_replicas = 1, .min_activation = 8},
      {.tau = 0.0, .max_size = 64, .max_replicas = 3, .min_activation = 8},
      {.tau = 1.0, .max_size = 20, .max_replicas = 4, .min_activation = 1},
      {.tau = 0.6, .max_size = 1, .max_replicas = 3, .min_activation = 8},
      {.tau = 2.0 / 3.0, .max_size = 1000, .max_replicas = 1000, .min_activation = 2},
  };
  return kVariants;
}

TEST(Clustering, MatchesAlgorithm1) {
  for (uint32_t seed = 0; seed < 12; ++seed) {
    const Signatures s = topics(seed, 40 + 13 * seed, 1 + seed % 3, 4 + seed, 0.02 * (seed % 4));
    for (size_t v = 0; v < variants().size(); ++v) {
      ASSERT_TRUE(same(cluster(s, variants()[v]), reference(s, variants()[v])))
          << "seed " << seed << " variant " << v;
    }
  }
}

// Few queries give many equal distances, and distances equal to tau.
TEST(Clustering, MatchesAlgorithm1OnTies) {
  for (uint32_t seed = 0; seed < 10; ++seed) {
    std::mt19937 random(seed);
    Signatures s = empty_signatures(150, 1);
    for (int64_t& bits : s.bits) bits = static_cast<int64_t>(random() % 256);
    for (const double tau : {0.25, 0.5, 0.6, 0.75, 2.0 / 3.0}) {
      const ClusterOptions options{
          .tau = tau, .max_size = 12, .max_replicas = 2, .min_activation = 1};
      ASSERT_TRUE(same(cluster(s, options), reference(s, options))) << seed << " " << tau;
    }
  }
}

TEST(Clustering, ReferenceNoticesMistakes) {
  const Signatures s = topics(3, 120, 2, 8, 0.02);
  const ClusterOptions options{.tau = 0.6, .max_size = 8, .max_replicas = 2, .min_activation = 4};
  const Clusters good = cluster(s, options);
  ASSERT_TRUE(same(good, reference(s, options)));
  for (const ClusterOptions& other :
       {ClusterOptions{.tau = 0.55, .max_size = 8, .max_replicas = 2, .min_activation = 4},
        ClusterOptions{.tau = 0.6, .max_size = 9, .max_replicas = 2, .min_activation = 4},
        ClusterOptions{.tau = 0.6, .max_size = 8, .max_replicas = 1, .min_activation = 4},
        ClusterOptions{.tau = 0.6, .max_size = 8, .max_replicas = 2, .min_activation = 20}}) {
    EXPECT_FALSE(same(good, reference(s, other)));
  }
}

TEST(Clustering, KeepsItsPromises) {
  size_t clusters_with_company = 0;
  size_t replicas = 0;
  for (uint32_t seed = 100; seed < 130; ++seed) {
    std::mt19937 random(seed);
    const Signatures s = topics(seed, random() % 400, 1 + random() % 5, 1 + random() % 20, 0.05);
    for (const ClusterOptions& options : variants()) {
      const Clusters clusters = cluster(s, options);
      ASSERT_EQ(violation(s, options, clusters), "") << seed;
      for (int64_t c = 0; c < clusters.count(); ++c) clusters_with_company += clusters.size(c) > 1;
      replicas += clusters.members.size() - static_cast<size_t>(s.entries);
    }
  }
  EXPECT_GT(clusters_with_company, 1000u);
  EXPECT_GT(replicas, 1000u);
}

TEST(Clustering, CheckerNoticesBrokenPromises) {
  const Signatures s = topics(5, 200, 3, 10, 0.02);
  const ClusterOptions options;
  const Clusters good = cluster(s, options);
  ASSERT_EQ(violation(s, options, good), "");
  int64_t c = 0;
  while (good.size(c) < 3) ++c;
  const int64_t first = good.offsets[c];
  Clusters bad = good;
  std::swap(bad.members[first + 1], bad.members[first + 2]);
  std::swap(bad.members[first], bad.members[first + 2]);
  EXPECT_NE(violation(s, options, bad), "");
  bad = good;
  bad.members.back() = bad.members[first];
  EXPECT_NE(violation(s, options, bad), "");
  bad = good;
  bad.members[first + 1] = good.members.back();
  EXPECT_NE(violation(s, options, bad), "");
  bad = good;
  bad.members.pop_back();
  --bad.offsets.back();
  EXPECT_NE(violation(s, options, bad), "");
  ClusterOptions tighter = options;
  tighter.max_replicas = 1;
  EXPECT_EQ(violation(s, tighter, good), "replicas");
}

TEST(Clustering, GrowthSkipsAFailureAndGoesOn) {
  // Medoid 0 = {0..9}. Entry 1 = {0..4}, entry 2 = {5..9}: each at 0.5 from the medoid, at 1 from
  // each other. Entry 3 = {0..4, 10}: further from the medoid (6/11), near entry 1.
  Signatures s = empty_signatures(4, 1);
  for (int t = 0; t < 10; ++t) s.set(0, t);
  for (int t = 0; t < 5; ++t) s.set(1, t), s.set(2, t + 5), s.set(3, t);
  s.set(3, 10);
  const Clusters clusters =
      cluster(s, {.tau = 0.6, .max_size = 64, .max_replicas = 1, .min_activation = 1});
  EXPECT_EQ(clusters.members, (std::vector<int64_t>{0, 1, 3, 2}));
  EXPECT_EQ(clusters.offsets, (std::vector<int64_t>{0, 3, 4}));
}

TEST(Clustering, AllCold) {
  Signatures s = empty_signatures(5, 2);
  s.set(3, 70);
  const Clusters clusters = cluster(s, {});
  EXPECT_EQ(clusters.members, (std::vector<int64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(clusters.offsets, (std::vector<int64_t>{0, 1, 2, 3, 4, 5}));
}

TEST(Clustering, AllIdentical) {
  Signatures s = empty_signatures(700, 1);
  for (int64_t i = 0; i < 700; ++i) s.bits[i] = 0xfff;
  const ClusterOptions small;
  const Clusters clusters = cluster(s, small);
  EXPECT_EQ(violation(s, small, clusters), "");
  EXPECT_TRUE(same(clusters, reference(s, small)));
  EXPECT_EQ(clusters.size(0), 64);
  EXPECT_EQ(clusters.medoid(0), 0);
  // Beyond the candidates that growth looks at.
  const ClusterOptions large{.tau = 0.6, .max_size = 600, .max_replicas = 3, .min_activation = 8};
  EXPECT_EQ(cluster(s, large).size(0), 1 + kMaxGrowthCandidates);
}

TEST(Clustering, Empty) {
  EXPECT_EQ(cluster_signatures(nullptr, 0, 4, {}).count(), 0);
  const Clusters no_queries = cluster_signatures(nullptr, 3, 0, {});
  EXPECT_EQ(no_queries.members, (std::vector<int64_t>{0, 1, 2}));
}

TEST(Clustering, ThreadCountDoesNotMatter) {
  const int threads = num_threads();
  // Rows of 1024 words are long enough to be split between threads.
  const Signatures narrow = topics(2, 700, 1, 40, 0.01);
  Signatures wide = empty_signatures(700, 1024);
  for (size_t i = 0; i < wide.bits.size(); ++i) wide.bits[i] = narrow.bits[i / 1024];
  const Signatures cases[] = {topics(1, 2500, 4, 100, 0.02), wide};
  for (const Signatures& s : cases) {
    const ClusterOptions options{
        .tau = 0.4, .max_size = 64, .max_replicas = 1, .min_activation = 4};
    set_num_threads(1);
    const Clusters expected = cluster(s, options);
    for (const int other : {2, 5}) {
      set_num_threads(other);
      EXPECT_TRUE(same(cluster(s, options), expected)) << other;
    }
  }
  set_num_threads(threads);
}

TEST(Clustering, RejectsBadOptions) {
  const int64_t bits = 1;
  for (const ClusterOptions& options :
       {ClusterOptions{.tau = -0.1}, ClusterOptions{.tau = 1.1},
        ClusterOptions{.tau = std::nan("")}, ClusterOptions{.max_size = 0},
        ClusterOptions{.max_replicas = 0}, ClusterOptions{.min_activation = 0}}) {
    EXPECT_THROW(cluster_signatures(&bits, 1, 1, options), Error);
  }
  EXPECT_THROW(cluster_signatures(&bits, -1, 1, {}), Error);
  EXPECT_THROW(cluster_signatures(&bits, 1, -1, {}), Error);
  EXPECT_NO_THROW(cluster_signatures(&bits, 1, 1, {}));
}

TEST(SequenceBlocks, NeighboursTogether) {
  const Clusters clusters = sequence_blocks(10, 4);
  EXPECT_EQ(clusters.offsets, (std::vector<int64_t>{0, 4, 8, 10}));
  EXPECT_EQ(clusters.members, (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(sequence_blocks(0, 4).count(), 0);
  EXPECT_EQ(sequence_blocks(3, 100).count(), 1);
  EXPECT_EQ(sequence_blocks(3, INT64_MAX).count(), 1);
  EXPECT_THROW(sequence_blocks(-1, 4), Error);
  EXPECT_THROW(sequence_blocks(4, 0), Error);
}

TEST(Clusterer, FindsStrategiesByName) {
  const Signatures s = topics(1, 100, 2, 5, 0.01);
  ClusterOptions options;
  options.max_size = 7;
  const auto run = [&](const std::string& name) {
    return make_clusterer(name)->cluster(s.bits.data(), s.entries, s.words, options);
  };
  EXPECT_TRUE(same(run("swarm"), cluster(s, options)));
  EXPECT_TRUE(same(run("sequence_blocks"), sequence_blocks(100, 7)));
  EXPECT_FALSE(same(run("swarm"), run("sequence_blocks")));
  try {
    make_clusterer("kmeans");
    FAIL() << "no exception";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kArgument);
    for (const std::string& name : clusterer_names()) {
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace swarm_kv
