#pragma once

#include <cstdint>
#include <vector>

namespace swarm_kv {

// Cluster c is members[offsets[c] .. offsets[c + 1]), its medoid first. An entry may be a member of
// several clusters; an index into `members` (a "member position") names one copy of it. Members
// from offsets.back() on are loose: in no cluster, read one by one, in the order in which they are
// stored.
struct Clusters {
  std::vector<int32_t> offsets{0};
  std::vector<int32_t> members;

  int64_t count() const { return static_cast<int64_t>(offsets.size()) - 1; }
  int64_t size(int64_t cluster) const { return offsets[cluster + 1] - offsets[cluster]; }
  int64_t medoid(int64_t cluster) const { return members[offsets[cluster]]; }
  int64_t loose() const { return static_cast<int64_t>(members.size()) - offsets.back(); }
};

}  // namespace swarm_kv
