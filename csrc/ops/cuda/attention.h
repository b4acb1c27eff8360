#pragma once

#include <cstdint>

#include "core/entry_source.h"
#include "ops/cuda/device.h"

namespace swarm_kv::cuda {

// One call of sparse_attention. Shapes and meanings as in swarm_kv/ops.py; all pointers are
// contiguous device memory. `q` and `pool` hold `element` (not float64); out and lse are float32.
// The pool, and each entry in it, begins at a multiple of 16 bytes. Slots are looked at on the
// device alone: one that is not such a multiple or reaches outside the pool is not read, and makes
// its row NaN. `row_offsets` that do not ascend from 0 to `total` give rows of no meaning.
struct SparseAttention {
  const void* q;  // [rows, query_heads, dim]
  const void* pool;
  int64_t pool_size;  // elements
  Element element;
  const int64_t* slots;  // [total]
  int64_t total;
  const int64_t* row_offsets;  // [rows + 1]
  int64_t rows;
  int64_t query_heads;
  int64_t kv_heads;
  int64_t dim;  // 64, 128 or 256
  float scale;
  const float* sinks;  // [query_heads] or null
  float softcap;       // 0: none
  float* out;          // [rows, query_heads, dim]
  float* lse;          // [rows, query_heads]
  // A block attends to `chunk` neighbours of `slots`, of whichever rows they are.
  int64_t chunk;
  float* scratch;  // scratch_size(call) floats
};

// Entries per block that occupy a device of so many multiprocessors.
int64_t suitable_chunk(const SparseAttention& call, int64_t multiprocessors);

// Floats that `scratch` must hold; needs rows, total, query_heads, dim and chunk.
int64_t scratch_size(const SparseAttention& call);

bool is_head_size(int64_t dim);

// Enqueues the call on `stream` and returns the launch's error. Nothing is read on the host.
cudaError_t sparse_attention(const SparseAttention& call, cudaStream_t stream);

}  // namespace swarm_kv::cuda
