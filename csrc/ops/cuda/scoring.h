#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/cuda/values.h"
#include "ops/score_queries.h"

// The scores of ops/cpu/scoring.h on a GPU, enqueued on `stream`: out[n] = mean over KV heads and
// rows of softmax_n(scale * q . key(n)), items >= 1. All pointers are to contiguous device memory,
// `scratch` to as many bytes, aligned to 256, as the function before says. Each returns the first
// error of its launches. Results do not depend on the order in which blocks run.
//
// Three steps: a kernel per form of keys writes the scores of all rows, and of each run of them
// what a softmax needs to know (maximum and sum); a second one joins these per row; a third one
// adds up the rows' weights item by item. Scores of one layer stay in the second-level cache.
namespace swarm_kv::cuda {

// turned[kv, r] = queries[kv, r] * turn[kv]; turn [kv_heads, dim, dim].
cudaError_t turn_queries(const ScoreQueries& queries, Values turn, float* turned,
                         cudaStream_t stream);

// Keys [kv_heads, items, dim].
size_t score_keys_scratch(const ScoreQueries& queries, int64_t items);
cudaError_t score_keys(const ScoreQueries& queries, Values keys, int64_t items, float scale,
                       float* out, void* scratch, cudaStream_t stream);

// Keys of four bits: feature d of a key is its step times scales[kv, d]; keys [kv_heads, items,
// dim / 2], byte j with the steps of features j (low half) and j + dim / 2; dim even.
size_t score_coded_keys_scratch(const ScoreQueries& queries, int64_t items);
cudaError_t score_coded_keys(const ScoreQueries& queries, const uint8_t* keys, const float* scales,
                             int64_t items, float scale, float* out, void* scratch,
                             cudaStream_t stream);

// Product-quantised keys: codebooks [kv_heads, parts, codewords, dim / parts], codewords <= 256;
// codes [kv_heads, parts, items], each < codewords.
size_t score_codes_scratch(const ScoreQueries& queries, int64_t parts, int64_t codewords,
                           int64_t items);
cudaError_t score_codes(const ScoreQueries& queries, const float* codebooks, int64_t parts,
                        int64_t codewords, const uint8_t* codes, int64_t items, float scale,
                        float* out, void* scratch, cudaStream_t stream);

// The same with 16 codewords and two codes to a byte, codes [kv_heads, parts / 2, items], parts
// even and at most kScanMaxParts (core/nibble_scan.h). Tables are rounded as on the CPU, to steps
// of the widest part's range / kScanTableMax; the softmax over them is exact here.
size_t score_packed_codes_scratch(const ScoreQueries& queries, int64_t parts, int64_t items);
cudaError_t score_packed_codes(const ScoreQueries& queries, const float* codebooks, int64_t parts,
                               const uint8_t* codes, int64_t items, float scale, float* out,
                               void* scratch, cudaStream_t stream);

// greatest = the greatest of `count` codes, 0 if there are none.
cudaError_t max_code(const uint8_t* codes, int64_t count, int32_t* greatest, cudaStream_t stream);

}  // namespace swarm_kv::cuda
