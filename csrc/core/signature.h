#pragma once

#include <cstdint>

namespace swarm_kv {

struct SignatureOptions {
  double sparsity = 0.10;  // share of the context that one query activates, in (0, 1]
  int64_t window = 256;  // most recent tokens, the query's own included: resident, never activated
  int64_t sinks = 0;     // first tokens: resident, never activated
  double scale = 1.0;    // multiplies q . k before the softmax
  int64_t context = 0;   // tokens that `sparsity` refers to; 0: num_entries
};

// Profiles one layer of one sequence: which entries does each query activate (arXiv 2603.17803
// section 5.1).
//
// q [heads_q, num_queries, dim] and k [heads_kv, num_entries, dim], float32 contiguous, as
// attention sees them (rotated); query head h uses key head h / (heads_q / heads_kv). q_position
// [num_queries]: the index of each query's own token in key numbering, >= 0; it may be >=
// num_entries for a query that comes after the entries.
//
// Query t sees keys j <= q_position[t]. Its score for j is the softmax over all keys that it sees,
// averaged over query heads. Keys j < sinks or j > q_position[t] - window take their mass but are
// not eligible. The query activates the max(1, round(sparsity * context)) eligible keys with the
// highest positive scores; equal scores go to the lower index.
//
// bits [num_entries, ceil(num_queries / 64)], row-major, overwritten: bit t % 64 of word t / 64 of
// row j is set when query t activates entry j. The result does not depend on the number of threads.
//
// Scratch: 2 * 32 * num_entries floats per thread. Throws Error(kArgument), before writing `bits`,
// on sizes or options outside their limits and on NaN or infinity in q or k; scores that overflow
// float32 also throw, with `bits` then unspecified.
void activation_signatures(const float* q, int64_t heads_q, int64_t num_queries, const float* k,
                           int64_t heads_kv, int64_t num_entries, int64_t dim,
                           const int64_t* q_position, const SignatureOptions& options,
                           int64_t* bits);

}  // namespace swarm_kv
