#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/hot_entries.h"
#include "core/signature_distance.h"

namespace swarm_kv {

struct Candidate {
  double distance;  // to the medoid
  int32_t id;
  int32_t slot;

  bool operator<(const Candidate& other) const {
    return std::pair(distance, id) < std::pair(other.distance, other.id);
  }
};

// How Algorithm 1 looks at the neighbourhoods of slots. Distances are exact in either strategy.
class CandidateSearch {
 public:
  virtual ~CandidateSearch() = default;

  // What to order the slots by: how many others are within tau, or in proportion to it.
  virtual std::vector<int32_t> densities() const = 0;

  // Sets `candidates` to the slots within tau of `medoid`, itself excluded, that `full` [slots]
  // does not mark, in ascending order. From any thread.
  virtual void find(int32_t medoid, const std::vector<bool>& full,
                    std::vector<Candidate>& candidates) const = 0;
};

// Finds everything. Each look costs a scan of the slots; memory a copy of their signatures.
std::unique_ptr<CandidateSearch> exact_search(const HotEntries& hot,
                                              const SignatureDistance& distance);

// Finds the neighbours that a SignatureForest does, and counts densities against a sample of
// kDensitySample slots. Both depend on `seed`. Time and memory are near-linear in the slots.
std::unique_ptr<CandidateSearch> hashed_search(const HotEntries& hot,
                                               const SignatureDistance& distance, uint64_t seed);

inline constexpr int64_t kDensitySample = 4096;

}  // namespace swarm_kv
