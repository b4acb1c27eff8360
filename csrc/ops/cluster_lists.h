#pragma once

#include <cstdint>

namespace swarm_kv {

// Clusters as two arrays, in the memory of their device: cluster c is members[offsets[c] ..
// offsets[c + 1]); members beyond the last cluster are in none. Every member is within [0,
// entries).
struct ClusterLists {
  const int32_t* offsets;
  const int32_t* members;
  int64_t count;    // of clusters
  int64_t entries;  // of the context
};

// What an operator checks of lists and of the values that it ranks by.
struct ListFacts {
  int32_t first_offset;
  int32_t last_offset;
  int32_t decreases;        // 1 where an offset is below the one before
  int32_t least_member;     // 0 without members
  int32_t greatest_member;  // -1 without members
  int32_t nan;              // 1 where a value is NaN
};

}  // namespace swarm_kv
