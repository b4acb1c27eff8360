#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/coalesce.h"
#include "core/segment.h"

namespace swarm_kv {

// What Eq. 6 of arXiv 2603.17803 scores: a cluster, or a loose entry as a cluster of one.
struct TierCandidate {
  double activations;  // f: profile queries that activated a member, mean over the members
  double size;         // s: entries
  double t_base;       // seconds per request, mean over the drives that hold the cluster
  double t_transfer;   // seconds per entry, mean over the same drives
};

// Which clusters are worth fast memory: those with the highest score.
class TierScore {
 public:
  virtual ~TierScore() = default;
  virtual double score(const TierCandidate& candidate) const = 0;
};

// "printed": (f * T_base + s * T_transfer) / s, as Eq. 6 stands; "product":
// f * (T_base + s * T_transfer) / s, the seconds that the profile's reads take per entry; "none":
// nullptr. Throws Error(kArgument) listing the names.
std::unique_ptr<TierScore> make_tier_score(const std::string& name);

// The profile of a segment that is written, for the cluster cache to begin with.
struct InitialFill {
  std::string score = "none";            // as make_tier_score takes it
  std::span<const int32_t> activations;  // per entry: profile queries that activated it
  int64_t queries = 0;                   // length of the profile

  // Throws Error(kArgument) unless there is one count in [0, queries] for each of `entries`.
  void check(int64_t entries) const;
};

// The segment's entries, each once, in the order in which they should enter fast memory: clusters
// and loose entries by descending score (ties: as stored), members of a cluster together.
std::vector<int32_t> tier_order(const Segment& segment, std::span<const int32_t> activations,
                                const std::vector<DriveShape>& drives, const TierScore& score);

}  // namespace swarm_kv
