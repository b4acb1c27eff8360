#pragma once

#include <cstdint>

#include "core/numeric.h"
#include "ops/score_queries.h"

namespace swarm_kv::cpu {

// turned[kv, r] = queries[kv, r] * turn[kv]; turn [kv_heads, dim, dim]. T is float, fp16 or bf16.
template <typename T>
void turn_queries(const ScoreQueries& queries, const T* turn, float* turned);

// out[n] = mean over KV heads and rows of softmax_n(scale * q . key(n)); items >= 1.
// key(n): the codewords codebooks[kv, m, codes[kv, m, n]] of all m, one after the other.
// codebooks [kv_heads, parts, codewords, dim / parts], codewords <= 256; codes [kv_heads, parts,
// items], each < codewords.
void score_codes(const ScoreQueries& queries, const float* codebooks, int64_t parts,
                 int64_t codewords, const uint8_t* codes, int64_t items, float scale, float* out);

// The same with 16 codewords and two codes to a byte, as core/nibble_scan.h has them: codes
// [kv_heads, parts / 2, items], parts even and at most kScanMaxParts. Each row's tables q .
// codeword are rounded to steps of their widest part's range / kScanTableMax, so that a logit is
// off by at most parts / 2 steps.
void score_packed_codes(const ScoreQueries& queries, const float* codebooks, int64_t parts,
                        const uint8_t* codes, int64_t items, float scale, float* out);

// The same with plain keys [kv_heads, items, dim], widened a few at a time; T is float, fp16 or
// bf16.
template <typename T>
void score_keys(const ScoreQueries& queries, const T* keys, int64_t items, float scale, float* out);

// The same with keys of four bits: feature d of a key is its step times scales[kv, d]; keys
// [kv_heads, items, dim / 2], byte j with the steps of features j (low half) and j + dim / 2; dim
// even.
void score_coded_keys(const ScoreQueries& queries, const uint8_t* keys, const float* scales,
                      int64_t items, float scale, float* out);

// The greatest of `count` codes, 0 if there are none.
uint8_t max_code(const uint8_t* codes, int64_t count);

}  // namespace swarm_kv::cpu
