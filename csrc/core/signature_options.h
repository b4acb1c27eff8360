#pragma once

#include <cstdint>
#include <string>

// What activation_signatures (core/signature.h) takes, and the checks of it, which other devices
// make too.
namespace swarm_kv {

// How the query heads of one layer share an entry's activations (the paper is silent about heads).
enum class HeadAggregation {
  kMean,   // rank by the mean over query heads of the softmax
  kMax,    // rank by its maximum
  kUnion,  // each query head activates its own entries; a query activates what any of them does
};

// "mean", "max" or "union". Throws Error(kArgument) that lists the known names.
HeadAggregation head_aggregation(const std::string& name);

// q [heads_q, num_queries, dim_q] and k [heads_kv, num_entries, dim_k].
struct SignatureSizes {
  int64_t heads_q;
  int64_t num_queries;
  int64_t dim_q;
  int64_t heads_kv;
  int64_t num_entries;
  int64_t dim_k;
};

struct SignatureOptions {
  double sparsity = 0.10;  // share of the context that one query activates, in (0, 1]
  int64_t window = 256;  // most recent tokens, the query's own included: resident, never activated
  int64_t sinks = 0;     // first tokens: resident, never activated
  double scale = 1.0;    // multiplies q . k before the softmax
  int64_t context = 0;   // tokens that `sparsity` refers to; 0: the number of entries
  HeadAggregation heads = HeadAggregation::kMean;
};

// Entries that one query activates at most: the share of the context, at least one.
int32_t activation_budget(const SignatureOptions& options, int64_t num_entries);

// The checks of activation_signatures, on every device: on sizes and options, and on
// the largest magnitudes, NaN or infinity when there is one (of lse 0 where it is not given).
void check_signature_sizes(const SignatureSizes& sizes, const SignatureOptions& options);
void check_signature_values(float largest_q, float largest_k, float largest_lse, int64_t dim,
                            double scale);

}  // namespace swarm_kv
