#pragma once

#include <cstdint>
#include <vector>

namespace swarm_kv::cpu {

// Entries to read as intervals of `members`, the order in which `count` copies of them lie; see
// swarm_kv/ops.py. Ascending, exactly min(budget, distinct members) of them. probs [entries],
// finite and >= 0; every member within [0, entries); budget >= 0; request_cost finite and >= 0.
//
// The optimal sets for all lambda at once: with v = 1 / lambda and x = whether a position is taken,
// lambda's objective is, up to its sign, sum of (1 - v * p) x + request_cost / 2 * |steps of x|.
// Such sets grow with v, and the v at which each position joins minimises
// sum of (p * v^2 / 2 - v) + request_cost / 2 * |steps of v|, a weighted total variation problem.
// Its solution are the slopes of the shortest path (the taut string) through a tube of height
// request_cost around the points (sum of p so far, positions so far), found in O(count).
std::vector<int64_t> select_intervals(const float* probs, int64_t entries, const int32_t* members,
                                      int64_t count, int64_t budget, double request_cost);

// Whether all values are finite and >= 0, as `probs` must be.
bool all_amounts(const float* values, int64_t count);

}  // namespace swarm_kv::cpu
