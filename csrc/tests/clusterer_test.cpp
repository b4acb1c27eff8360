#include "core/clusterer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/hypergraph.h"
#include "core/nearest_medoid.h"
#include "io/error.h"

namespace swarm_kv {
namespace {

bool same(const Clusters& a, const Clusters& b) {
  return a.offsets == b.offsets && a.members == b.members;
}

// One word of queries per entry.
Clusters run(const std::string& name, const std::vector<int64_t>& bits,
             const ClusterOptions& options) {
  return make_clusterer(name)->cluster(bits.data(), static_cast<int64_t>(bits.size()), 1, options);
}

// A chain: neighbours share 6 of 8 queries, next-but-one 4.
std::vector<int64_t> chain(int64_t entries) {
  std::vector<int64_t> bits;
  for (int64_t i = 0; i < entries; ++i) bits.push_back(int64_t{0xff} << (2 * i));
  return bits;
}

TEST(Clusterer, FindsStrategiesByName) {
  const std::vector<int64_t> bits = chain(20);
  ClusterOptions options{.tau = 0.7, .max_size = 7, .min_activation = 1};
  options.block = 5;
  const auto entries = static_cast<int64_t>(bits.size());
  EXPECT_TRUE(
      same(run("swarm", bits, options), cluster_signatures(bits.data(), entries, 1, options)));
  EXPECT_TRUE(same(run("hypergraph", bits, options),
                   hypergraph_clusters(bits.data(), entries, 1, options)));
  EXPECT_TRUE(same(run("medoid_only", bits, options),
                   nearest_medoid_clusters(bits.data(), entries, 1, options)));
  EXPECT_TRUE(same(run("sequence_blocks", bits, options), sequence_blocks(entries, 7)));
  std::vector<Clusters> all;
  for (const std::string& name : clusterer_names()) {
    const Clusters clusters = run(name, bits, options);
    for (const Clusters& other : all) EXPECT_FALSE(same(clusters, other)) << name;
    all.push_back(clusters);
  }
  EXPECT_EQ(all.size(), 5u);
}

TEST(Clusterer, UnknownNameListsTheKnownOnes) {
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

TEST(Clusterer, NoReplicaNeverCopies) {
  const std::vector<int64_t> bits = chain(20);
  const ClusterOptions options{.tau = 0.7, .max_replicas = 5, .min_activation = 1};
  EXPECT_EQ(run("no_replica", bits, options).members.size(), 20u);
  EXPECT_GT(run("swarm", bits, options).members.size(), 20u);
}

TEST(Clusterer, EveryStrategyChecksItsOptions) {
  const std::vector<int64_t> bits = chain(4);
  for (const std::string& name : clusterer_names()) {
    EXPECT_NO_THROW(run(name, bits, {})) << name;
    EXPECT_THROW(run(name, bits, {.max_size = 0}), Error) << name;
    EXPECT_THROW(run(name, bits, {.cold = "warm"}), Error) << name;
  }
}

TEST(NearestMedoid, EntriesGoToTheNearestAlone) {
  // Entry 2 is within tau of the medoids 0 and 3, and nearer to 3, the later one, although it is
  // far from their other members. Entry 4 is near nobody.
  const std::vector<int64_t> bits = {0xff, 0x3f, 0xff8, 0xfff0, 0x7f0000, 0xfc00, 0x3f, 0xfc00};
  ClusterOptions options{.tau = 0.6, .min_activation = 1};
  const Clusters clusters = nearest_medoid_clusters(bits.data(), 8, 1, options);
  EXPECT_EQ(clusters.offsets, (std::vector<int32_t>{0, 3, 7}));
  EXPECT_EQ(clusters.members, (std::vector<int32_t>{0, 1, 6, 3, 2, 5, 7, 4}));
  options.tau = 0.3;  // near neither, and 3 near 5 and 7 no more
  const Clusters tight = nearest_medoid_clusters(bits.data(), 8, 1, options);
  EXPECT_EQ(tight.members, (std::vector<int32_t>{0, 1, 6, 5, 7, 2, 3, 4}));
}

TEST(NearestMedoid, LargeGroupsAreCutNearestFirst) {
  // All within tau of entry 0, ever further from it.
  const std::vector<int64_t> bits = {0xffff, 0xfff, 0xfffe, 0xfff0, 0x7fff, 0x3fff, 0x1fff};
  ClusterOptions options{.tau = 0.6, .max_size = 3, .min_activation = 1, .cold = "single"};
  const Clusters clusters = nearest_medoid_clusters(bits.data(), 7, 1, options);
  EXPECT_EQ(clusters.members.size(), 7u);
  EXPECT_EQ(clusters.offsets, (std::vector<int32_t>{0, 3, 6, 7}));
  EXPECT_EQ(clusters.members, (std::vector<int32_t>{0, 2, 4, 5, 6, 1, 3}));
  options.max_size = 64;
  EXPECT_EQ(nearest_medoid_clusters(bits.data(), 7, 1, options).count(), 1);
}

}  // namespace
}  // namespace swarm_kv
