#pragma once

#include <cstddef>
#include <cstdint>

#include "core/signature_options.h"
#include "ops/cuda/values.h"

// activation_signatures of core/signature.h on a GPU. All pointers are to device memory.
namespace swarm_kv::cuda {

// Queries float32 [heads, count, dim], contiguous.
struct SignatureQueries {
  const float* data;
  int64_t heads;
  int64_t count;
  int64_t dim;
  const int64_t* position;  // [count]
  const float* lse;         // [heads, count], or null
};

// Keys [heads, rows, dim]; the features of a row are contiguous, strides count values.
struct SignatureKeys {
  Values values;
  int64_t heads;
  int64_t rows;
  int64_t head_stride;
  int64_t row_stride;
};

// What the host checks before bits are computed.
struct SignatureExtremes {
  float q;  // the largest magnitude; NaN or infinity when there is one
  float k;
  float lse;          // 0 without lse
  int32_t positions;  // the least one or -1, whichever is greater; 0 without queries
};

// extremes: device memory for one.
cudaError_t signature_extremes(const SignatureQueries& q, const SignatureKeys& k,
                               SignatureExtremes* extremes, cudaStream_t stream);

// Enqueues what core/signature.h says, without its checks: bits [k.rows, ceil(q.count / 64)].
// `scratch` holds signature_scratch bytes, about 256 per key, and is aligned to 256.
//
// Sixty-four queries at a time, one word of bits: a pass over the keys for the log-sum-exp where it
// is not given, one that adds up probabilities over heads, a radix select for each query's
// threshold, and one that packs a word per key. Scores are products in float32: tensor cores would
// round them.
size_t signature_scratch(const SignatureQueries& q, const SignatureKeys& k);
cudaError_t activation_signatures(const SignatureQueries& q, const SignatureKeys& k,
                                  const SignatureOptions& options, int64_t* bits, void* scratch,
                                  cudaStream_t stream);

}  // namespace swarm_kv::cuda
