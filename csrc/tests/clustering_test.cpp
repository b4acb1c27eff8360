#include "core/clustering.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <cmath>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

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

Clusters hashed(const Signatures& signatures, const ClusterOptions& options) {
  return cluster_signatures(signatures.bits.data(), signatures.entries, signatures.words, options,
                            /*exact_limit=*/0);
}

bool same(const Clusters& a, const Clusters& b) {
  return a.offsets == b.offsets && a.members == b.members;
}

// A distance by its definition.
class Distance {
 public:
  Distance(const Signatures& s, const std::string& name) : s_(s), name_(name) {
    if (name != "global") return;
    for (int64_t i = 0; i < s.entries; ++i) {
      for (int64_t j = 0; j < i; ++j) all_pairs_ += static_cast<double>(s.common(i, j));
    }
  }

  double operator()(int64_t i, int64_t j) const {
    const int64_t shared = s_.common(i, j);
    if (shared == 0) return 1.0;
    if (name_ == "global") return 1.0 - static_cast<double>(shared) / all_pairs_;
    const int64_t either = name_ == "jaccard" ? s_.popcount(i) + s_.popcount(j) - shared
                                              : std::min(s_.popcount(i), s_.popcount(j));
    return 1.0 - static_cast<double>(shared) / static_cast<double>(either);
  }

 private:
  const Signatures& s_;
  std::string name_;
  double all_pairs_ = 0.0;
};

// Algorithm 1 from its definition, with the full distance matrix.
Clusters reference(const Signatures& s, const ClusterOptions& options) {
  std::vector<int64_t> hot;
  for (int64_t i = 0; i < s.entries; ++i) {
    if (s.popcount(i) >= options.min_activation) hot.push_back(i);
  }
  const Distance by_definition(s, options.distance);
  std::vector<std::vector<double>> distance(s.entries, std::vector<double>(s.entries));
  std::vector<int64_t> density(s.entries, 0);
  for (const int64_t i : hot) {
    for (const int64_t j : hot) distance[i][j] = by_definition(i, j);
    for (const int64_t j : hot) density[i] += i != j && distance[i][j] <= options.tau;
  }
  std::vector<int64_t> order = hot;
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return density[a] > density[b]; });
  std::vector<int64_t> copies(s.entries, 0);
  Clusters clusters;
  int64_t bytes = 0;
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
    if (members.size() == 1) continue;
    bytes += 4 + 4 * static_cast<int64_t>(members.size());
    if (options.max_index_bytes > 0 && bytes > options.max_index_bytes) break;
    for (const int64_t member : members) {
      ++copies[member];
      clusters.members.push_back(static_cast<int32_t>(member));
    }
    clusters.offsets.push_back(static_cast<int32_t>(clusters.members.size()));
  }
  int64_t in_block = 0;
  for (int64_t i = 0; i < s.entries; ++i) {
    if (copies[i] > 0) continue;
    clusters.members.push_back(static_cast<int32_t>(i));
    if (options.cold == "coded") continue;
    if (options.cold == "single" || in_block == 0) clusters.offsets.push_back(0);
    clusters.offsets.back() = static_cast<int32_t>(clusters.members.size());
    in_block = (in_block + 1) % options.block;
  }
  return clusters;
}

// The first promise of cluster_signatures with cold "coded" that `clusters` breaks, or "".
std::string violation(const Signatures& s, const ClusterOptions& options,
                      const Clusters& clusters) {
  if (clusters.offsets.front() != 0 || clusters.loose() < 0) return "offsets";
  const Distance distance(s, options.distance);
  std::vector<int64_t> copies(s.entries, 0);
  for (int64_t c = 0; c < clusters.count(); ++c) {
    const int64_t size = clusters.size(c);
    if (size < 2 || size > options.max_size) return "size";
    const int32_t* members = clusters.members.data() + clusters.offsets[c];
    if (std::set<int32_t>(members, members + size).size() != static_cast<size_t>(size)) {
      return "an entry twice";
    }
    if (copies[members[0]] > 0) return "medoid covered before";
    for (int64_t i = 0; i < size; ++i) {
      ++copies[members[i]];
      if (s.popcount(members[i]) < options.min_activation) return "cold member";
      if (i == 0) continue;
      if (distance(members[0], members[i]) > options.tau) return "member beyond tau";
      double sum = 0.0;
      for (int64_t j = 0; j < i; ++j) sum += distance(members[i], members[j]);
      if (sum / static_cast<double>(i) > options.tau + 1e-12) return "mean distance";
      if (i > 1 && distance(members[0], members[i]) < distance(members[0], members[i - 1])) {
        return "member order";
      }
    }
  }
  if (options.max_index_bytes > 0 &&
      index_bytes(clusters.count(), clusters.offsets.back()) > options.max_index_bytes) {
    return "index bytes";
  }
  const auto loose = clusters.members.begin() + clusters.offsets.back();
  if (!std::is_sorted(loose, clusters.members.end())) return "loose order";
  for (auto entry = loose; entry != clusters.members.end(); ++entry) {
    if (copies[*entry]++ > 0) return "loose and in a cluster";
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
      {.tau = 0.6, .max_size = 64, .max_replicas = 3, .min_activation = 1, .cold = "single"},
      {.tau = 0.5, .max_size = 5, .max_replicas = 2, .min_activation = 4, .cold = "packed"},
      {.tau = 0.75, .max_size = 9, .max_replicas = 1, .min_activation = 8, .max_index_bytes = 300},
      {.tau = 0.0, .max_size = 64, .max_replicas = 3, .min_activation = 8},
      {.tau = 1.0, .max_size = 20, .max_replicas = 4, .min_activation = 1},
      {.tau = 0.6, .max_size = 1, .max_replicas = 3, .min_activation = 8},
      {.tau = 2.0 / 3.0, .max_size = 1000, .max_replicas = 1000, .min_activation = 2},
      {.distance = "conditional", .tau = 0.4},
      {.distance = "conditional", .tau = 1.0, .max_size = 30, .min_activation = 1},
      {.distance = "conditional", .tau = 0.25, .cold = "packed", .block = 3},
      {.distance = "global", .tau = 0.6},
      {.distance = "global", .tau = 0.9995, .min_activation = 1},
      {.distance = "global", .tau = 0.9999, .max_size = 7, .max_index_bytes = 100},
      {.distance = "global", .tau = 1.0, .max_size = 12},
  };
  return kVariants;
}

TEST(Clustering, MatchesAlgorithm1) {
  std::vector<int64_t> grown(variants().size(), 0);
  for (uint32_t seed = 0; seed < 12; ++seed) {
    const Signatures s = topics(seed, 40 + 13 * seed, 1 + seed % 3, 4 + seed, 0.02 * (seed % 4));
    for (size_t v = 0; v < variants().size(); ++v) {
      const Clusters clusters = cluster(s, variants()[v]);
      ASSERT_TRUE(same(clusters, reference(s, variants()[v])))
          << "seed " << seed << " variant " << v;
      if (clusters.count() > 0 && clusters.size(0) > 1) ++grown[v];
    }
  }
  // All distances were put to use; max_size 1 and the printed distance at tau 0.6 give nothing.
  for (size_t v = 0; v < grown.size(); ++v) {
    const bool none = variants()[v].max_size == 1 ||
                      (variants()[v].distance == "global" && variants()[v].tau < 0.9);
    EXPECT_EQ(grown[v] == 0, none) << "variant " << v;
  }
}

// Few queries give many equal distances, and distances equal to tau.
TEST(Clustering, MatchesAlgorithm1OnTies) {
  for (uint32_t seed = 0; seed < 10; ++seed) {
    std::mt19937 random(seed);
    Signatures s = empty_signatures(150, 1);
    for (int64_t& bits : s.bits) bits = static_cast<int64_t>(random() % 256);
    for (const std::string distance : {"jaccard", "conditional"}) {
      for (const double tau : {0.25, 0.5, 0.6, 0.75, 2.0 / 3.0}) {
        const ClusterOptions options{.distance = distance,
                                     .tau = tau,
                                     .max_size = 12,
                                     .max_replicas = 2,
                                     .min_activation = 1};
        ASSERT_TRUE(same(cluster(s, options), reference(s, options))) << seed << " " << tau;
      }
    }
  }
}

TEST(Clustering, ReferenceNoticesMistakes) {
  const Signatures s = topics(3, 120, 2, 8, 0.02);
  const ClusterOptions options{
      .tau = 0.6, .max_size = 8, .max_replicas = 2, .min_activation = 4, .cold = "packed"};
  const Clusters good = cluster(s, options);
  ASSERT_TRUE(same(good, reference(s, options)));
  std::vector<ClusterOptions> others(8, options);
  others[0].tau = 0.55;
  others[1].max_size = 9;
  others[2].max_replicas = 1;
  others[3].min_activation = 20;
  others[4].distance = "conditional";
  others[5].cold = "coded";
  others[6].block = 15;
  others[7].max_index_bytes = index_bytes(good.count(), good.offsets.back()) / 2;
  for (size_t i = 0; i < others.size(); ++i) EXPECT_FALSE(same(good, reference(s, others[i]))) << i;
}

TEST(Clustering, KeepsItsPromises) {
  int64_t clusters_of_many = 0;
  int64_t replicas = 0;
  for (uint32_t seed = 100; seed < 112; ++seed) {
    std::mt19937 random(seed);
    const Signatures s = topics(seed, random() % 400, 1 + random() % 5, 1 + random() % 20, 0.05);
    for (ClusterOptions options : variants()) {
      options.cold = "coded";
      options.seed = seed;
      for (const Clusters& clusters : {cluster(s, options), hashed(s, options)}) {
        ASSERT_EQ(violation(s, options, clusters), "") << seed;
        clusters_of_many += clusters.count();
        replicas += static_cast<int64_t>(clusters.members.size()) - s.entries;
      }
    }
  }
  EXPECT_GT(clusters_of_many, 1000);
  EXPECT_GT(replicas, 1000);
}

TEST(Clustering, CheckerNoticesBrokenPromises) {
  const Signatures s = topics(5, 200, 3, 10, 0.02);
  ClusterOptions options;
  options.min_activation = 30;
  const Clusters good = cluster(s, options);
  ASSERT_EQ(violation(s, options, good), "");
  ASSERT_GE(good.loose(), 2);
  int64_t c = 0;
  while (good.size(c) < 3) ++c;
  const int64_t first = good.offsets[c];
  const auto broken = [&](auto&& breaks) {
    Clusters bad = good;
    breaks(bad);
    return violation(s, options, bad);
  };
  EXPECT_EQ(broken([&](Clusters& bad) { bad.members[first + 1] = bad.members[first]; }),
            "an entry twice");
  EXPECT_EQ(broken([&](Clusters& bad) { bad.members[first + 1] = bad.members.back(); }),
            "cold member");
  EXPECT_EQ(broken([&](Clusters& bad) { bad.members.pop_back(); }), "not covered");
  EXPECT_EQ(broken([&](Clusters& bad) { bad.members.back() = bad.members[first]; }), "loose order");
  EXPECT_EQ(broken([&](Clusters& bad) {
              bad.members.push_back(bad.members[first]);
              std::sort(bad.members.begin() + bad.offsets.back(), bad.members.end());
            }),
            "loose and in a cluster");
  EXPECT_EQ(broken([&](Clusters& bad) { bad.offsets.push_back(bad.offsets.back() + 1); }), "size");
  EXPECT_EQ(broken([&](Clusters& bad) {
              bad.members.insert(bad.members.begin(), bad.members.begin(), bad.members.begin() + 2);
              for (int32_t& offset : bad.offsets) offset += offset > 0 ? 2 : 0;
              bad.offsets.insert(bad.offsets.begin() + 1, 2);
            }),
            "medoid covered before");
  EXPECT_NE(broken([&](Clusters& bad) {
              std::reverse(bad.members.begin() + first + 1,
                           bad.members.begin() + bad.offsets[c + 1]);
            }),
            "");
  const auto by = [&](auto&& tightens) {
    ClusterOptions tighter = options;
    tightens(tighter);
    return violation(s, tighter, good);
  };
  EXPECT_EQ(by([](ClusterOptions& tighter) { tighter.max_replicas = 1; }), "replicas");
  EXPECT_NE(by([](ClusterOptions& tighter) { tighter.tau = 0.3; }), "");
  EXPECT_EQ(by([](ClusterOptions& tighter) { tighter.max_size = 2; }), "size");
  EXPECT_EQ(by([](ClusterOptions& tighter) { tighter.max_index_bytes = 100; }), "index bytes");
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
  EXPECT_EQ(clusters.members, (std::vector<int32_t>{0, 1, 3, 2}));
  EXPECT_EQ(clusters.offsets, (std::vector<int32_t>{0, 3}));
}

TEST(Clustering, ColdEntriesByName) {
  // 2 and 5 are alike; 3 is hot and alone; the others are cold.
  Signatures s = empty_signatures(8, 1);
  s.bits = {1, 0, 0xff, 0xff00, 0, 0xff, 2, 1};
  const auto run = [&](const std::string& cold, int64_t block = 4) {
    return cluster(s, {.cold = cold, .block = block});
  };
  const std::vector<int32_t> members = {2, 5, 0, 1, 3, 4, 6, 7};
  EXPECT_EQ(run("coded").members, members);
  EXPECT_EQ(run("coded").offsets, (std::vector<int32_t>{0, 2}));
  EXPECT_EQ(run("packed").members, members);
  EXPECT_EQ(run("packed").offsets, (std::vector<int32_t>{0, 2, 6, 8}));
  EXPECT_EQ(run("packed", INT64_MAX).offsets, (std::vector<int32_t>{0, 2, 8}));
  EXPECT_EQ(run("single").members, members);
  EXPECT_EQ(run("single").offsets, (std::vector<int32_t>{0, 2, 3, 4, 5, 6, 7, 8}));
}

TEST(Clustering, AllCold) {
  Signatures s = empty_signatures(5, 2);
  s.set(3, 70);
  const auto run = [&](const std::string& cold) { return cluster(s, {.cold = cold, .block = 3}); };
  for (const std::string cold : {"coded", "packed", "single"}) {
    EXPECT_EQ(run(cold).members, (std::vector<int32_t>{0, 1, 2, 3, 4}));
  }
  EXPECT_EQ(run("coded").offsets, (std::vector<int32_t>{0}));
  EXPECT_EQ(run("packed").offsets, (std::vector<int32_t>{0, 3, 5}));
  EXPECT_EQ(run("single").offsets, (std::vector<int32_t>{0, 1, 2, 3, 4, 5}));
}

TEST(Clustering, OneEntry) {
  Signatures s = empty_signatures(1, 1);
  s.bits[0] = 0xffff;
  for (const Clusters& clusters : {cluster(s, {}), hashed(s, {})}) {
    EXPECT_EQ(clusters.members, (std::vector<int32_t>{0}));
    EXPECT_EQ(clusters.count(), 0);
  }
  EXPECT_EQ(cluster(s, {.cold = "single"}).count(), 1);
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
  EXPECT_EQ(violation(s, small, hashed(s, small)), "");
  EXPECT_EQ(hashed(s, small).loose(), 0);
  // Beyond the candidates that growth looks at.
  const ClusterOptions large{.tau = 0.6, .max_size = 600, .max_replicas = 3, .min_activation = 8};
  EXPECT_EQ(cluster(s, large).size(0), 1 + kMaxGrowthCandidates);
}

TEST(Clustering, Empty) {
  EXPECT_EQ(cluster_signatures(nullptr, 0, 4, {}).count(), 0);
  EXPECT_EQ(cluster_signatures(nullptr, 0, 4, {}, 0).members.size(), 0u);
  for (const std::string distance : {"jaccard", "conditional", "global"}) {
    const Clusters no_queries = cluster_signatures(nullptr, 3, 0, {.distance = distance});
    EXPECT_EQ(no_queries.members, (std::vector<int32_t>{0, 1, 2}));
    EXPECT_EQ(no_queries.loose(), 3);
  }
}

TEST(Clustering, IndexHoldsTheDensestClusters) {
  const Signatures s = topics(8, 400, 2, 12, 0.02);
  ClusterOptions options;
  const Clusters all = cluster(s, options);
  ASSERT_GT(all.count(), 10);
  const int64_t first = index_bytes(1, all.size(0));
  const int64_t five = index_bytes(5, all.offsets[5]);
  for (const auto& [bytes, count] : {std::pair(int64_t{1}, 0),
                                     {11, 0},
                                     {first - 1, 0},
                                     {first, 1},
                                     {five, 5},
                                     {five + 11, 5},
                                     {INT64_MAX, all.count()}}) {
    options.max_index_bytes = bytes;
    const Clusters clusters = cluster(s, options);
    ASSERT_EQ(clusters.count(), count) << bytes;
    EXPECT_EQ(violation(s, options, clusters), "");
    EXPECT_TRUE(std::equal(clusters.offsets.begin(), clusters.offsets.end(), all.offsets.begin()));
    EXPECT_TRUE(std::equal(clusters.members.begin(),
                           clusters.members.begin() + clusters.offsets.back(),
                           all.members.begin()));
  }
}

// A forest of few slots finds all of them.
TEST(HashedClustering, ExactWhereNothingIsOutOfReach) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    const Signatures s = topics(seed, 40, 2, 4, 0.02);
    for (ClusterOptions options : variants()) {
      options.seed = seed;
      ASSERT_TRUE(same(hashed(s, options), cluster(s, options))) << seed;
    }
  }
}

// Mean size, share of entries covered, copies per covered entry.
std::array<double, 3> summary(const Signatures& s, const Clusters& clusters) {
  const double members = clusters.offsets.back();
  const double covered = static_cast<double>(s.entries - clusters.loose());
  return {members / static_cast<double>(clusters.count()), covered / static_cast<double>(s.entries),
          members / covered};
}

TEST(HashedClustering, CloseToExact) {
  const Signatures s = topics(4, 4000, 4, 400, 0.02);
  ClusterOptions options;
  const auto exact = summary(s, cluster(s, options));
  const auto approximate = summary(s, hashed(s, options));
  ASSERT_GT(exact[1], 0.5);
  for (size_t i = 0; i < exact.size(); ++i) {
    EXPECT_NEAR(approximate[i] / exact[i], 1.0, 0.1) << i;
  }
  // Other options give another summary.
  options.tau = 0.5;
  EXPECT_GT(std::abs(summary(s, hashed(s, options))[0] / exact[0] - 1.0), 0.1);
}

TEST(HashedClustering, DependsOnTheSeedAlone) {
  const Signatures s = topics(6, 3000, 4, 200, 0.02);
  ClusterOptions options;
  const Clusters expected = hashed(s, options);
  EXPECT_TRUE(same(hashed(s, options), expected));
  options.seed = 1;
  EXPECT_FALSE(same(hashed(s, options), expected));
  EXPECT_EQ(same(cluster(s, options), cluster(s, {})), true);
}

TEST(Clustering, ThreadCountDoesNotMatter) {
  const int threads = num_threads();
  const Signatures s = topics(1, 2500, 4, 100, 0.02);
  const ClusterOptions options{.tau = 0.4, .max_size = 64, .max_replicas = 2, .min_activation = 4};
  set_num_threads(1);
  const Clusters exact = cluster(s, options);
  const Clusters approximate = hashed(s, options);
  EXPECT_FALSE(same(exact, approximate));
  for (const int other : {2, 5}) {
    set_num_threads(other);
    EXPECT_TRUE(same(cluster(s, options), exact)) << other;
    EXPECT_TRUE(same(hashed(s, options), approximate)) << other;
  }
  set_num_threads(threads);
}

TEST(Clustering, RejectsBadOptions) {
  const int64_t bits = 1;
  for (const ClusterOptions& options :
       {ClusterOptions{.tau = -0.1}, ClusterOptions{.tau = 1.1},
        ClusterOptions{.tau = std::nan("")}, ClusterOptions{.max_size = 0},
        ClusterOptions{.max_replicas = 0}, ClusterOptions{.min_activation = 0},
        ClusterOptions{.block = 0}, ClusterOptions{.max_index_bytes = -1}}) {
    EXPECT_THROW(cluster_signatures(&bits, 1, 1, options), Error);
  }
  EXPECT_THROW(cluster_signatures(&bits, -1, 1, {}), Error);
  EXPECT_THROW(cluster_signatures(&bits, 1, -1, {}), Error);
  EXPECT_NO_THROW(cluster_signatures(&bits, 1, 1, {}));
}

TEST(Clustering, UnknownNamesListTheKnown) {
  const int64_t bits = 1;
  const auto message = [&](const ClusterOptions& options) -> std::string {
    try {
      cluster_signatures(&bits, 1, 1, options);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kArgument);
      return error.what();
    }
    return "";
  };
  EXPECT_NE(message({.distance = "cosine"}).find("jaccard, conditional, global"),
            std::string::npos);
  EXPECT_NE(message({.cold = "frozen"}).find("coded, packed, single"), std::string::npos);
}

TEST(SequenceBlocks, NeighboursTogether) {
  const Clusters clusters = sequence_blocks(10, 4);
  EXPECT_EQ(clusters.offsets, (std::vector<int32_t>{0, 4, 8, 10}));
  EXPECT_EQ(clusters.members, (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(sequence_blocks(0, 4).count(), 0);
  EXPECT_EQ(sequence_blocks(3, 100).count(), 1);
  EXPECT_EQ(sequence_blocks(3, INT64_MAX).count(), 1);
  EXPECT_THROW(sequence_blocks(-1, 4), Error);
  EXPECT_THROW(sequence_blocks(4, 0), Error);
}

}  // namespace
}  // namespace swarm_kv
