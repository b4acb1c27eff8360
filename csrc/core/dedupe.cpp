#include "core/dedupe.h"

#include <algorithm>
#include <string>

#include "io/error.h"

namespace swarm_kv {
namespace {

struct Located {
  int32_t segment;
  int64_t local;
};

// Finds the segment of a number when each segment holds `count_of(segment)` of them.
template <typename CountOf>
Located locate(const std::vector<Segment*>& segments, int64_t number, const char* what,
               CountOf count_of) {
  int64_t rest = number;
  for (size_t i = 0; rest >= 0 && i < segments.size(); ++i) {
    const int64_t count = count_of(*segments[i]);
    if (rest < count) return {static_cast<int32_t>(i), rest};
    rest -= count;
  }
  throw Error(ErrorKind::kArgument, std::string(what) + " " + std::to_string(number) +
                                        " does not exist in this layer's segments");
}

}  // namespace

WantedList dedupe(const Selection& selection) {
  std::vector<int64_t> base(selection.segments.size() + 1, 0);
  for (size_t i = 0; i < selection.segments.size(); ++i) {
    base[i + 1] = base[i] + selection.segments[i]->entries;
  }
  struct ClusterCopy {
    int64_t id;
    Candidate candidate;
  };
  std::vector<ClusterCopy> by_cluster;
  for (const int64_t number : selection.clusters) {
    const Located cluster = locate(selection.segments, number, "cluster",
                                   [](const Segment& segment) { return segment.clusters.count(); });
    const Clusters& clusters = selection.segments[cluster.segment]->clusters;
    for (int64_t at = clusters.offsets[cluster.local]; at < clusters.offsets[cluster.local + 1];
         ++at) {
      const int64_t id = base[cluster.segment] + clusters.members[at];
      if (id >= selection.limit) continue;
      by_cluster.push_back({id, {static_cast<int32_t>(at), static_cast<int32_t>(cluster.local)}});
    }
  }
  std::sort(by_cluster.begin(), by_cluster.end(), [](const ClusterCopy& a, const ClusterCopy& b) {
    return a.id != b.id ? a.id < b.id : a.candidate.position < b.candidate.position;
  });
  std::vector<int64_t> singles;
  for (const int64_t id : selection.entries) {
    if (id < 0 || id >= base.back()) {
      throw Error(ErrorKind::kArgument, "entry " + std::to_string(id) + " is outside [0, " +
                                            std::to_string(base.back()) + ")");
    }
    if (id < selection.limit) singles.push_back(id);
  }
  std::sort(singles.begin(), singles.end());
  singles.erase(std::unique(singles.begin(), singles.end()), singles.end());

  WantedList wanted;
  wanted.entries.reserve(by_cluster.size() + singles.size());
  wanted.candidates.reserve(by_cluster.size() + singles.size());
  size_t segment = 0;
  auto cluster_copy = by_cluster.begin();
  auto single = singles.begin();
  while (cluster_copy != by_cluster.end() || single != singles.end()) {
    const bool from_cluster = cluster_copy != by_cluster.end() &&
                              (single == singles.end() || cluster_copy->id <= *single);
    const int64_t id = from_cluster ? cluster_copy->id : *single;
    while (id >= base[segment + 1]) ++segment;
    Wanted entry{static_cast<int32_t>(segment), static_cast<int32_t>(id - base[segment]), id,
                 static_cast<int32_t>(wanted.candidates.size()), 0};
    if (from_cluster) {
      for (; cluster_copy != by_cluster.end() && cluster_copy->id == id; ++cluster_copy) {
        // A cluster named twice brings the same copy twice.
        const Candidate& copy = cluster_copy->candidate;
        if (entry.candidates > 0 && wanted.candidates.back().position == copy.position) continue;
        wanted.candidates.push_back(copy);
        ++entry.candidates;
      }
    } else {
      const Segment& holder = *selection.segments[segment];
      for (const int32_t position : holder.routing.copies_of(entry.entry)) {
        wanted.candidates.push_back({position, group_of(holder.clusters, position)});
        ++entry.candidates;
      }
    }
    if (single != singles.end() && *single == id) ++single;
    wanted.entries.push_back(entry);
  }
  return wanted;
}

}  // namespace swarm_kv
