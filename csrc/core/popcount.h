#pragma once

#include <cstdint>
#include <vector>

namespace swarm_kv {

// Signatures are compared one against a block of kLanes, stored [words][kLanes], so that lanes are
// vector lanes.
inline constexpr int64_t kLanes = 8;

inline int64_t blocks_for(int64_t signatures) { return (signatures + kLanes - 1) / kLanes; }

// Writes the signature `row` [words] as signature `index` of `blocks`.
inline void copy_to_blocks(const uint64_t* row, int64_t words, int64_t index, uint64_t* blocks) {
  uint64_t* lane = blocks + index / kLanes * words * kLanes + index % kLanes;
  for (int64_t w = 0; w < words; ++w) lane[w * kLanes] = row[w];
}

// common[b * kLanes + l] = bits that `row` [words] shares with lane l of block b, for num_blocks
// blocks.
using CountCommon = void(const uint64_t* row, const uint64_t* blocks, int64_t num_blocks,
                         int64_t words, int32_t* common);

struct PopcountKernel {
  const char* name;
  CountCommon* count_common;
};

// The kernels that this processor can run, the fastest first. All give the same counts.
const std::vector<PopcountKernel>& popcount_kernels();

// The fastest kernel.
CountCommon count_common;

}  // namespace swarm_kv
