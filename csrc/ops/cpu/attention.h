#pragma once

#include <cstdint>

#include "core/numeric.h"

namespace swarm_kv::cpu {

// One call of sparse_attention. Shapes and meanings as in swarm_kv/ops.py; all arrays are
// contiguous and checked. Acc is double for a pool of doubles and float otherwise.
template <typename T, typename Acc>
struct SparseAttention {
  const Acc* q;  // [rows, query_heads, dim]
  const T* pool;
  const int64_t* slots;
  const int64_t* row_offsets;  // [rows + 1]
  int64_t rows;
  int64_t query_heads;
  int64_t kv_heads;
  int64_t dim;
  Acc scale;
  const Acc* sinks;  // [query_heads] or null
  Acc softcap;       // 0: none
  Acc* out;          // [rows, query_heads, dim]
  Acc* lse;          // [rows, query_heads]
};

void sparse_attention(const SparseAttention<float, float>& call);
void sparse_attention(const SparseAttention<fp16, float>& call);
void sparse_attention(const SparseAttention<bf16, float>& call);
void sparse_attention(const SparseAttention<double, double>& call);

// out = merge of two partial attentions over disjoint keys, [rows, dim] and [rows]; `out` may alias
// out_a.
template <typename Acc>
void merge_attention(const Acc* out_a, const Acc* lse_a, const Acc* out_b, const Acc* lse_b,
                     int64_t rows, int64_t dim, Acc* out, Acc* lse);

}  // namespace swarm_kv::cpu
