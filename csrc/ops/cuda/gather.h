#pragma once

#include <cstdint>

#include "core/entry_source.h"
#include "ops/cuda/device.h"

namespace swarm_kv::cuda {

// Where `count` entries lie and where they go. Offsets count in units of `unit` bytes; no address
// need be aligned, but those that differ by a multiple of 16 are copied fastest. Memory is the
// device's, or the host's that is pinned and mapped. Sources and targets must not overlap. An entry
// outside the source is not read but filled with ones, which are NaN; one outside the target is
// left out.
struct Entries {
  const void* source;
  int64_t source_size;  // bytes
  const int64_t* from;  // [count] offsets in source
  void* target;
  int64_t target_size;  // bytes
  const int64_t* to;    // [count] offsets in target, or null: one after the other
  int64_t count;
  int64_t unit;
};

// Copies entries of `bytes` bytes. Enqueued on `stream`; returns the launch's error.
cudaError_t gather_entries(const Entries& entries, int64_t bytes, cudaStream_t stream);

// How entries [K | V] of `heads` heads of `dim` numbers are written on the drives and shall be in
// memory.
struct Coding {
  enum class Code { kInt8, kKivi4 };  // of core/codec.h
  Code code;
  int64_t heads;
  int64_t dim;
  Element element;        // in memory; not float64
  const float* channels;  // [2, heads, dim] device memory, what Codec::channels gives; kivi4 alone
};

// Bytes of one entry's code, at most kMaxCodeBytes.
int64_t code_bytes(const Coding& coding);
inline constexpr int64_t kMaxCodeBytes = 96 << 10;

// Decodes entries. Enqueued on `stream`; returns the launch's error.
cudaError_t decode_entries(const Entries& entries, const Coding& coding, cudaStream_t stream);

}  // namespace swarm_kv::cuda
