#pragma once

#include <cstdint>
#include <string>

#include "core/clusters.h"

namespace swarm_kv {

struct ClusterOptions {
  std::string distance = "jaccard";  // "jaccard", "conditional" or "global"
  double tau = 0.6;                  // cluster radius, in [0, 1]
  int64_t max_size = 64;             // members of one cluster, >= 1
  int64_t max_replicas = 3;          // copies of one entry, >= 1
  int64_t min_activation = 8;        // entries activated by fewer queries are cold, >= 1
  std::string cold = "coded";        // "coded", "packed" or "single"
  int64_t block = 16;                // members of a block of cold entries, "packed", >= 1
  int64_t max_index_bytes = 0;       // of the clusters' offsets and members; 0: no limit
  uint64_t seed = 0;                 // of the sample and the hashes of a large input
};

// At most this many candidates, the nearest ones, are tried when a cluster grows.
inline constexpr int64_t kMaxGrowthCandidates = 512;

// Up to so many hot entries, Algorithm 1 is computed exactly.
inline constexpr int64_t kExactLimit = 8192;

// What clusters of two members or more cost in an index: an offset each, and 4 bytes per member.
constexpr int64_t index_bytes(int64_t clusters, int64_t members) {
  return 4 * (clusters + members);
}

// Algorithm 1 of arXiv 2603.17803 (section 5.1) on `bits` [num_entries, words], as
// activation_signatures writes them. `distance` is explained at SignatureDistance.
//
// The density of an entry is the number of others within tau (<=). Hot entries come in descending
// density (ties: lower id); the next one that no cluster covers becomes a medoid. Its candidates
// are all others within tau, covered ones included while they have fewer than max_replicas copies,
// in ascending distance (ties: lower id). A candidate joins when its mean distance to the members
// so far is <= tau (Eq. 5), else it is skipped, until max_size.
//
// A medoid that nobody joins makes no cluster: it would cost the index an entry and save no read.
// Clusters stop before index_bytes would exceed max_index_bytes; the densest come first, so those
// are what a small index holds. All entries that are then in no cluster, hot or cold, follow in
// sequence order, and max_index_bytes does not count them:
//   "coded"   as loose members;
//   "packed"  in clusters of `block`, the last one shorter, which may be larger than max_size;
//   "single"  in clusters of one, as the paper has them.
// So every entry is covered, in whatever input.
//
// With more than `exact_limit` hot entries, densities are estimated against a sample and candidates
// are searched by hashing, both by `seed`: a cluster may miss neighbours, the more likely the less
// their signatures overlap, but whatever joins has been compared exactly. ("conditional" also finds
// only what overlaps much: an entry may miss the more popular ones that contain it.)
//
// Time is near-linear in num_entries, quadratic up to exact_limit; memory beyond `bits` and the
// result is at most 96 bytes per entry, and a copy of the signatures of exact_limit entries. The
// result does not depend on the number of threads. Throws Error(kArgument) on sizes or options
// outside their limits; num_entries = 0 gives no clusters.
Clusters cluster_signatures(const int64_t* bits, int64_t num_entries, int64_t words,
                            const ClusterOptions& options, int64_t exact_limit = kExactLimit);

// What every clusterer that takes ClusterOptions begins with. Throws Error(kArgument) that names
// the value and the limit.
void check_options(int64_t num_entries, int64_t words, const ClusterOptions& options);

// And what it ends with: the entries that are in no cluster so far follow in sequence order, as
// `cold` says.
void append_uncovered(const std::string& cold, int64_t block, int64_t num_entries,
                      Clusters& clusters);

// Clusters of `block` neighbours in sequence, the last one shorter: the layout in token order, and
// the baseline of pages. Throws Error(kArgument) if num_entries < 0 or block < 1.
Clusters sequence_blocks(int64_t num_entries, int64_t block);

}  // namespace swarm_kv
