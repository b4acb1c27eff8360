#include "ops/cuda/device.h"
#include "ops/cuda/device_algorithms.h"
#include "ops/cuda/radix_select.h"
#include "ops/cuda/selection.h"
#include "ops/cuda/workspace.h"

namespace swarm_kv::cuda {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kWide = 1024;  // of a block that works alone

__device__ int64_t thread_number() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

// Launches one after the other, with at least `count` threads each, until one fails.
class Launches {
 public:
  explicit Launches(cudaStream_t stream) : stream_(stream) {}

  template <typename Kernel, typename... Arguments>
  void over(int64_t count, Kernel kernel, const Arguments&... arguments) {
    if (error_ != cudaSuccess || count == 0) return;
    const int64_t blocks = (count + kThreads - 1) / kThreads;
    error_ = launch(kernel, static_cast<unsigned>(blocks), kThreads, 0, stream_, arguments...);
  }

  template <typename Kernel, typename... Arguments>
  void block(Kernel kernel, const Arguments&... arguments) {
    if (error_ == cudaSuccess) error_ = launch(kernel, 1, kWide, 0, stream_, arguments...);
  }

  void add(cudaError_t error) {
    if (error_ == cudaSuccess) error_ = error;
  }

  cudaError_t error() const { return error_; }
  cudaStream_t stream() const { return stream_; }

 private:
  const cudaStream_t stream_;
  cudaError_t error_ = cudaSuccess;
};

// --- Checks --------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kWide)
    find_facts(const float* values, int64_t value_count, const int32_t* offsets, int64_t clusters,
               const int32_t* members, int64_t total, ListFacts* facts) {
  SWARM_KV_SHARED(warps, ListFacts[kWide / kWarp]);
  ListFacts own = {offsets[0], offsets[clusters], 0, 0, -1, 0};
  for (int64_t i = threadIdx.x; i < clusters; i += kWide) {
    if (offsets[i + 1] < offsets[i]) own.decreases = 1;
  }
  for (int64_t i = threadIdx.x; i < total; i += kWide) {
    own.least_member = min(own.least_member, members[i]);
    own.greatest_member = max(own.greatest_member, members[i]);
  }
  for (int64_t i = threadIdx.x; i < value_count; i += kWide) {
    if (values[i] != values[i]) own.nan = 1;
  }
  own.decreases = __reduce_max_sync(kAllLanes, own.decreases);
  own.least_member = __reduce_min_sync(kAllLanes, own.least_member);
  own.greatest_member = __reduce_max_sync(kAllLanes, own.greatest_member);
  own.nan = __reduce_max_sync(kAllLanes, own.nan);
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = own;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kWide / kWarp; ++i) {
    own.decreases = max(own.decreases, warps[i].decreases);
    own.least_member = min(own.least_member, warps[i].least_member);
    own.greatest_member = max(own.greatest_member, warps[i].greatest_member);
    own.nan = max(own.nan, warps[i].nan);
  }
  *facts = own;
}

// --- Clusters by rank ----------------------------------------------------------------------------

// Whose sort keys are not 0, which stands for a cluster that must not be taken.
struct Ranking {
  uint32_t* keys;
  uint32_t* sorted_keys;
  int32_t* ids;
  int32_t* sorted_ids;
  int32_t* first;  // [entries]: the rank of the first cluster that has it
  int32_t* fresh;  // [clusters]: entries of which the cluster of this rank is the first
  int32_t* held;   // [clusters]: entries in the clusters of this rank and before
  void* temporary;
  size_t temporary_bytes;

  Ranking(Workspace& workspace, const ClusterLists& clusters)
      : keys(workspace.take<uint32_t>(clusters.count)),
        sorted_keys(workspace.take<uint32_t>(clusters.count)),
        ids(workspace.take<int32_t>(clusters.count)),
        sorted_ids(workspace.take<int32_t>(clusters.count)),
        first(workspace.take<int32_t>(clusters.entries)),
        fresh(workspace.take<int32_t>(clusters.count)),
        held(workspace.take<int32_t>(clusters.count)) {
    size_t sort = 0, sum = 0;
    sort_descending(nullptr, sort, keys, sorted_keys, ids, sorted_ids, clusters.count, nullptr);
    inclusive_sum(nullptr, sum, fresh, held, clusters.count, nullptr);
    temporary_bytes = sort < sum ? sum : sort;
    temporary = workspace.take<char>(static_cast<int64_t>(temporary_bytes));
  }
};

__global__ void __launch_bounds__(kThreads)
    clear_ranking(ClusterLists clusters, Ranking ranking, Selected* selected) {
  const int64_t i = thread_number();
  if (i == 0) *selected = {0, 0, 0};
  if (i < clusters.entries) ranking.first[i] = static_cast<int32_t>(clusters.count);
  if (i < clusters.count) ranking.fresh[i] = 0;
}

__global__ void __launch_bounds__(kThreads)
    rank_scores(const float* scores, int64_t count, Ranking ranking) {
  const int64_t c = thread_number();
  if (c >= count) return;
  ranking.keys[c] = static_cast<uint32_t>(ranking_key(scores[c], c) >> 32);
  ranking.ids[c] = static_cast<int32_t>(c);
}

__global__ void __launch_bounds__(kThreads) find_first(ClusterLists clusters, Ranking ranking) {
  const int64_t rank = thread_number();
  if (rank >= clusters.count) return;
  const int32_t c = ranking.sorted_ids[rank];
  for (int32_t i = clusters.offsets[c]; i < clusters.offsets[c + 1]; ++i) {
    device_check(clusters.members[i] >= 0 && clusters.members[i] < clusters.entries,
                 "a member must be below the number of entries");
    atomicMin(&ranking.first[clusters.members[i]], static_cast<int32_t>(rank));
  }
}

__global__ void __launch_bounds__(kThreads) count_fresh(ClusterLists clusters, Ranking ranking) {
  const int64_t entry = thread_number();
  if (entry >= clusters.entries) return;
  const int32_t rank = ranking.first[entry];
  if (rank < clusters.count) atomicAdd(&ranking.fresh[rank], 1);
}

__global__ void __launch_bounds__(kThreads)
    take_ranked(int64_t count, int64_t budget, Ranking ranking, int64_t* ids, Selected* selected) {
  const int64_t rank = thread_number();
  if (rank >= count) return;
  const auto taken = [&](int64_t r) {
    return (r == 0 ? 0 : ranking.held[r - 1]) < budget && ranking.sorted_keys[r] != 0;
  };
  if (!taken(rank)) return;
  ids[rank] = ranking.sorted_ids[rank];
  if (rank + 1 == count || !taken(rank + 1)) {
    selected->clusters = rank + 1;
    selected->held = ranking.held[rank];
  }
}

// ranking.keys and ids are there, *selected and the rest are clear.
void take_by_rank(const ClusterLists& clusters, int64_t budget, Ranking& ranking, int64_t* ids,
                  Selected* selected, Launches& launches) {
  if (clusters.count == 0) return;
  launches.add(sort_descending(ranking.temporary, ranking.temporary_bytes, ranking.keys,
                               ranking.sorted_keys, ranking.ids, ranking.sorted_ids, clusters.count,
                               launches.stream()));
  launches.over(clusters.count, find_first, clusters, ranking);
  launches.over(clusters.entries, count_fresh, clusters, ranking);
  launches.add(inclusive_sum(ranking.temporary, ranking.temporary_bytes, ranking.fresh,
                             ranking.held, clusters.count, launches.stream()));
  launches.over(clusters.count, take_ranked, clusters.count, budget, ranking, ids, selected);
}

int64_t at_least_one(int64_t count) { return count > 0 ? count : 1; }

// --- Two levels ----------------------------------------------------------------------------------

// Clusters are open until they are settled or gain nothing.
enum State : uint8_t { kOpen, kChosen, kSettled };

struct Gains {
  unsigned long long* ranks;  // [clusters]: gain and id, 0 where nothing is gained
  uint8_t* states;            // [clusters]
  unsigned long long* best;   // [entries]: the greatest rank of an open cluster that has it
  uint8_t* taken;             // [entries]: by a settled cluster

  Gains(Workspace& workspace, const ClusterLists& clusters)
      : ranks(workspace.take<unsigned long long>(clusters.count)),
        states(workspace.take<uint8_t>(clusters.count)),
        best(workspace.take<unsigned long long>(clusters.entries)),
        taken(workspace.take<uint8_t>(clusters.entries)) {}

  __device__ bool open(int64_t c) const { return states[c] == kOpen && ranks[c] != 0; }
};

// Summed one by one as the CPU does, so that equal gains are equal.
__device__ unsigned long long gain_rank(const float* probs, const ClusterLists& clusters, int64_t c,
                                        double request_cost, const uint8_t* taken) {
  const int32_t first = clusters.offsets[c], last = clusters.offsets[c + 1];
  double mass = 0;
  for (int32_t i = first; i < last; ++i) {
    const int32_t entry = clusters.members[i];
    device_check(entry >= 0 && entry < clusters.entries,
                 "a member must be below the number of entries");
    mass += taken[entry] != 0 ? 0.0f : probs[entry];
  }
  const float gain =
      mass == 0 ? 0.0f
                : static_cast<float>(mass / (request_cost + static_cast<double>(last - first)));
  return gain > 0 ? ranking_key(gain, c) : 0;
}

__global__ void __launch_bounds__(kThreads) clear_gains(ClusterLists clusters, Gains gains) {
  const int64_t i = thread_number();
  if (i < clusters.entries) gains.taken[i] = 0;
  if (i < clusters.count) gains.states[i] = kOpen;
}

__global__ void __launch_bounds__(kThreads)
    clear_best(ClusterLists clusters, Gains gains, int32_t* open) {
  const int64_t i = thread_number();
  if (i == 0) *open = 0;
  if (i < clusters.entries) gains.best[i] = 0;
}

__global__ void __launch_bounds__(kThreads)
    find_gains(const float* probs, ClusterLists clusters, double request_cost, Gains gains,
               int32_t* open) {
  const int64_t c = thread_number();
  if (c >= clusters.count || gains.states[c] != kOpen) return;
  gains.ranks[c] = gain_rank(probs, clusters, c, request_cost, gains.taken);
  if (gains.ranks[c] != 0) atomicAdd(open, 1);
}

__global__ void __launch_bounds__(kThreads) find_best(ClusterLists clusters, Gains gains) {
  const int64_t c = thread_number();
  if (c >= clusters.count || !gains.open(c)) return;
  for (int32_t i = clusters.offsets[c]; i < clusters.offsets[c + 1]; ++i) {
    const int32_t entry = clusters.members[i];
    if (gains.taken[entry] == 0) atomicMax(&gains.best[entry], gains.ranks[c]);
  }
}

__global__ void __launch_bounds__(kThreads) choose(ClusterLists clusters, Gains gains) {
  const int64_t c = thread_number();
  if (c >= clusters.count || !gains.open(c)) return;
  for (int32_t i = clusters.offsets[c]; i < clusters.offsets[c + 1]; ++i) {
    const int32_t entry = clusters.members[i];
    if (gains.taken[entry] == 0 && gains.best[entry] != gains.ranks[c]) return;
  }
  gains.states[c] = kChosen;
}

__global__ void __launch_bounds__(kThreads) settle(ClusterLists clusters, Gains gains) {
  const int64_t c = thread_number();
  if (c >= clusters.count || gains.states[c] != kChosen) return;
  gains.states[c] = kSettled;
  for (int32_t i = clusters.offsets[c]; i < clusters.offsets[c + 1]; ++i) {
    uint8_t& taken = gains.taken[clusters.members[i]];
    if (taken == 0) taken = 1;  // by no other thread: it was the best
  }
}

__global__ void __launch_bounds__(kThreads)
    rank_gains(int64_t count, Gains gains, Ranking ranking) {
  const int64_t c = thread_number();
  if (c >= count) return;
  ranking.keys[c] = gains.states[c] == kSettled ? static_cast<uint32_t>(gains.ranks[c] >> 32) : 0;
  ranking.ids[c] = static_cast<int32_t>(c);
}

// Whether an entry is one of the strongest outside the clusters that were taken.
struct Outside {
  const float* probs;
  const int32_t* first;
  const Selected* selected;
  const unsigned long long* threshold;

  __device__ unsigned long long rank(int64_t entry) const {
    return first[entry] < selected->clusters ? 0 : ranking_key(probs[entry], entry);
  }
  __host__ __device__ bool operator()(int64_t entry) const {
#if defined(__CUDA_ARCH__) || defined(SWARM_KV_EMULATION)
    return rank(entry) >= *threshold;
#else
    return false;
#endif
  }
};

// The least rank that is taken. A block alone.
__global__ void __launch_bounds__(kWide)
    find_threshold(Outside outside, int64_t entries, int64_t budget,
                   unsigned long long* threshold) {
  SWARM_KV_SHARED(storage, RadixSelectStorage);
  const int64_t count = budget - outside.selected->held;
  unsigned long long least = ~0ull;  // none
  if (count > 0) {
    least = radix_select<kWide>(
        entries, count, [&](int64_t entry) { return outside.rank(entry); }, storage);
  }
  if (threadIdx.x == 0) *threshold = least;
}

__global__ void __launch_bounds__(kThreads) number(int64_t count, int64_t* numbers) {
  const int64_t i = thread_number();
  if (i < count) numbers[i] = i;
}

struct TwoLevelScratch {
  Ranking ranking;
  Gains gains;
  unsigned long long* threshold;
  void* temporary;
  size_t temporary_bytes;

  TwoLevelScratch(Workspace& workspace, const ClusterLists& clusters)
      : ranking(workspace, clusters),
        gains(workspace, clusters),
        threshold(workspace.take<unsigned long long>(1)) {
    select_indices(nullptr, temporary_bytes, clusters.entries, Outside{}, nullptr, nullptr,
                   nullptr);
    temporary = workspace.take<char>(static_cast<int64_t>(temporary_bytes));
  }
};

}  // namespace

cudaError_t inspect_lists(const float* values, int64_t value_count, const int32_t* offsets,
                          int64_t clusters, const int32_t* members, int64_t total, ListFacts* facts,
                          cudaStream_t stream) {
  Launches launches(stream);
  launches.block(find_facts, values, value_count, offsets, clusters, members, total, facts);
  return launches.error();
}

size_t select_clusters_scratch(const ClusterLists& clusters) {
  Workspace workspace(nullptr);
  Ranking(workspace, clusters);
  return workspace.bytes();
}

cudaError_t select_clusters(const float* scores, const ClusterLists& clusters, int64_t budget,
                            int64_t* ids, Selected* selected, void* scratch, cudaStream_t stream) {
  Workspace workspace(scratch);
  Ranking ranking(workspace, clusters);
  Launches launches(stream);
  launches.over(at_least_one(max(clusters.entries, clusters.count)), clear_ranking, clusters,
                ranking, selected);
  launches.over(clusters.count, rank_scores, scores, clusters.count, ranking);
  take_by_rank(clusters, budget, ranking, ids, selected, launches);
  return launches.error();
}

cudaError_t all_entries(int64_t count, int64_t* entries, cudaStream_t stream) {
  Launches launches(stream);
  launches.over(count, number, count, entries);
  return launches.error();
}

size_t select_two_level_scratch(const ClusterLists& clusters) {
  Workspace workspace(nullptr);
  TwoLevelScratch(workspace, clusters);
  return workspace.bytes();
}

cudaError_t settle_gains(const TwoLevel& call, bool first, int rounds, int32_t* open, void* memory,
                         cudaStream_t stream) {
  Workspace workspace(memory);
  const Gains gains = TwoLevelScratch(workspace, call.clusters).gains;
  const ClusterLists& clusters = call.clusters;
  Launches launches(stream);
  if (first) {
    launches.over(at_least_one(max(clusters.entries, clusters.count)), clear_gains, clusters,
                  gains);
    launches.over(at_least_one(clusters.entries), clear_best, clusters, gains, open);
    launches.over(clusters.count, find_gains, call.probs, clusters, call.request_cost, gains, open);
  }
  for (int i = 0; i < rounds; ++i) {
    launches.over(clusters.count, find_best, clusters, gains);
    launches.over(clusters.count, choose, clusters, gains);
    launches.over(clusters.count, settle, clusters, gains);
    launches.over(at_least_one(clusters.entries), clear_best, clusters, gains, open);
    launches.over(clusters.count, find_gains, call.probs, clusters, call.request_cost, gains, open);
  }
  return launches.error();
}

cudaError_t take_two_level(const TwoLevel& call, int64_t* ids, int64_t* entries, Selected* selected,
                           void* memory, cudaStream_t stream) {
  Workspace workspace(memory);
  TwoLevelScratch scratch(workspace, call.clusters);
  const ClusterLists& clusters = call.clusters;
  const int64_t cluster_budget =
      call.budget - static_cast<int64_t>(call.single_share * static_cast<double>(call.budget));
  Launches launches(stream);
  launches.over(at_least_one(max(clusters.entries, clusters.count)), clear_ranking, clusters,
                scratch.ranking, selected);
  if (cluster_budget > 0) {
    launches.over(clusters.count, rank_gains, clusters.count, scratch.gains, scratch.ranking);
    take_by_rank(clusters, cluster_budget, scratch.ranking, ids, selected, launches);
  }
  const Outside outside{call.probs, scratch.ranking.first, selected, scratch.threshold};
  launches.block(find_threshold, outside, clusters.entries, call.budget, scratch.threshold);
  launches.add(select_indices(scratch.temporary, scratch.temporary_bytes, clusters.entries, outside,
                              entries, &selected->entries, stream));
  return launches.error();
}

}  // namespace swarm_kv::cuda
