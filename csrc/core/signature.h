#pragma once

#include <cstdint>

#include "core/head_rows.h"
#include "core/signature_options.h"

namespace swarm_kv {

// Profiles one layer of one sequence: which entries does each query activate (arXiv 2603.17803
// section 5.1).
//
// q [heads_q, num_queries, dim] and k [heads_kv, num_entries, dim], as attention sees them
// (rotated); query head h uses key head h / (heads_q / heads_kv). q_position [num_queries]: the
// index of each query's own token in key numbering, >= 0; it may be >= num_entries for a query that
// comes after the entries. lse [heads_q, num_queries], as attention computes it: the log-sum-exp of
// the scaled scores of one query head over all keys that it sees, which may be more than k holds.
// Null: computed from k, which reads k twice.
//
// Query t sees keys j <= q_position[t]. A head's probability of j is min(1, exp(score - lse)), and
// the query's is aggregated over query heads as options.heads says. Keys j < sinks or
// j > q_position[t] - window take their mass but are not eligible. The query activates the
// max(1, round(sparsity * context)) eligible keys with the highest positive probabilities; equal
// ones go to the lower index. Computed in float32.
//
// bits [num_entries, ceil(num_queries / 64)], row-major, overwritten: bit t % 64 of word t / 64 of
// row j is set when query t activates entry j. The result does not depend on the number of threads.
//
// Keys are converted block by block. Scratch, for all threads together: at most the size of
// `bits` or 2 MiB, whichever is larger (for fewer than 512 queries, 64 bytes per entry), and what
// does not grow with num_entries. Throws Error(kArgument), before writing `bits`, on sizes or
// options outside their limits, on NaN or infinity in q, k or lse, and when scores may overflow
// float32.
void activation_signatures(const HeadRows& q, const HeadRows& k, const int64_t* q_position,
                           const float* lse, const SignatureOptions& options, int64_t* bits);

}  // namespace swarm_kv
