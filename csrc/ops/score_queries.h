#pragma once

#include <cstdint>

namespace swarm_kv {

// Queries [kv_heads, rows, dim] of a score, in the memory of its device: for each KV head the rows
// of all query heads and queries that it serves.
struct ScoreQueries {
  const float* data;
  int64_t kv_heads;
  int64_t rows;
  int64_t dim;
};

}  // namespace swarm_kv
