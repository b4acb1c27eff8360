#pragma once

#include <cstdint>

namespace swarm_kv::cpu {

// Queries [kv_heads, rows, dim]: for each KV head the rows of all query heads and queries that it
// serves.
struct ScoreQueries {
  const float* data;
  int64_t kv_heads;
  int64_t rows;
  int64_t dim;
};

// out[n] = mean over KV heads and rows of softmax_n(scale * q . key(n)); items >= 1.
// key(n): the codewords codebooks[kv, m, codes[kv, m, n]] of all m, one after the other.
// codebooks [kv_heads, parts, codewords, dim / parts], codewords <= 256; codes [kv_heads, parts,
// items], each < codewords.
void score_codes(const ScoreQueries& queries, const float* codebooks, int64_t parts,
                 int64_t codewords, const uint8_t* codes, int64_t items, float scale, float* out);

// The same with plain keys [kv_heads, items, dim].
void score_keys(const ScoreQueries& queries, const float* keys, int64_t items, float scale,
                float* out);

// The greatest of `count` codes, 0 if there are none.
uint8_t max_code(const uint8_t* codes, int64_t count);

}  // namespace swarm_kv::cpu
