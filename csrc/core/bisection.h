#pragma once

#include <cstdint>
#include <vector>

namespace swarm_kv {

// Reorders `entries` so that those which one query activates lie near each other, and cuts the
// order into leaves of at most `max_leaf` (>= 1). Returns where the leaves end.
//
// A query is a hyperedge over the entries whose bit it sets. The order comes from recursive
// bisection. A half of m entries, d of them active, costs a query d log2(m / (d + 1)): about the
// bits that its gaps between active entries would take to write down, so that what is cheap lies in
// few dense runs. Each split starts from the given order and swaps the pairs of entries between its
// halves whose exchange saves most, while any saves. Splitting goes on below the leaves, which are
// therefore ordered inside too.
//
// bits [.., words]: the signatures, a row per entry. Time is O(bits set * log(entries)) for each of
// at most 10 rounds per split. The result does not depend on the number of threads.
std::vector<int64_t> bisect(const uint64_t* bits, int64_t words, int64_t max_leaf,
                            std::vector<int32_t>& entries);

}  // namespace swarm_kv
