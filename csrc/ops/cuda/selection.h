#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/cluster_lists.h"
#include "ops/cuda/device.h"

// The selections of ops/cpu/selection.h on a GPU, enqueued on `stream`. All pointers are to device
// memory, `scratch` to as many bytes, aligned to 256, as the function before says. Each returns the
// first error of its launches.
//
// select_intervals stays on the host: its taut string is one pass whose every step depends on the
// last one. Scores go there (512 KiB at 128K entries, 10 us), where the ids that it gives are
// needed anyway, to read them.
namespace swarm_kv::cuda {

// Of values [value_count], offsets [clusters + 1] and members [total].
cudaError_t inspect_lists(const float* values, int64_t value_count, const int32_t* offsets,
                          int64_t clusters, const int32_t* members, int64_t total, ListFacts* facts,
                          cudaStream_t stream);

// How much was selected.
struct Selected {
  int64_t clusters;
  int64_t held;     // distinct entries in them
  int64_t entries;  // single ones
};

// ids [selected->clusters], with room for all: clusters in descending score (ties: lower id) until
// they hold `budget` distinct entries. No score is NaN.
//
// Ranked by a radix sort; each entry then counts for the first cluster in this order that has it,
// and a prefix sum over clusters shows where the budget is met.
size_t select_clusters_scratch(const ClusterLists& clusters);
cudaError_t select_clusters(const float* scores, const ClusterLists& clusters, int64_t budget,
                            int64_t* ids, Selected* selected, void* scratch, cudaStream_t stream);

// entries = 0, 1, ... count - 1.
cudaError_t all_entries(int64_t count, int64_t* entries, cudaStream_t stream);

// cpu::select_two_level, entry by entry the same, in two calls: gains are settled in rounds, as
// many as it takes, and then taken.
//
// Greedy selection looks sequential: each cluster that is taken lowers the gains of those that
// share entries with it. But a cluster whose gain exceeds those of all clusters that share an entry
// with it which is not taken yet will be taken at this gain, whatever else is taken before: gains
// only fall, so no neighbour comes first. One round settles all such clusters and takes their
// entries from the others. Gains in the order in which greedy selection takes never rise, so it is
// the order by settled gain, ties by lower id.
struct TwoLevel {
  const float* probs;  // [clusters.entries], >= 0
  ClusterLists clusters;
  int64_t budget;  // < clusters.entries
  double request_cost;
  double single_share;
};

size_t select_two_level_scratch(const ClusterLists& clusters);

// Adds `rounds` rounds, from the start on where `first`. *open: clusters that are not settled yet.
cudaError_t settle_gains(const TwoLevel& call, bool first, int rounds, int32_t* open, void* scratch,
                         cudaStream_t stream);

// ids and entries [selected->...], with room for all clusters and for `budget` entries.
cudaError_t take_two_level(const TwoLevel& call, int64_t* ids, int64_t* entries, Selected* selected,
                           void* scratch, cudaStream_t stream);

}  // namespace swarm_kv::cuda
