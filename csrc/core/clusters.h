#pragma once

#include <cstdint>
#include <vector>

namespace swarm_kv {

// Cluster c is members[offsets[c] .. offsets[c + 1]), its medoid first. An entry may be a member of
// several clusters; an index into `members` (a "member position") names one copy of it.
struct Clusters {
  std::vector<int64_t> offsets{0};
  std::vector<int64_t> members;

  int64_t count() const { return static_cast<int64_t>(offsets.size()) - 1; }
  int64_t size(int64_t cluster) const { return offsets[cluster + 1] - offsets[cluster]; }
  int64_t medoid(int64_t cluster) const { return members[offsets[cluster]]; }
};

}  // namespace swarm_kv
