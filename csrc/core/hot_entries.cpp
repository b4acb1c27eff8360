#include "core/hot_entries.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "core/parallel.h"
#include "core/popcount.h"
#include "core/simd.h"

namespace swarm_kv {
namespace {

SWARM_KV_CLONES void count_bits(const uint64_t* bits, int64_t entries, int64_t words,
                                int32_t* popcounts) {
  for (int64_t i = 0; i < entries; ++i) {
    int32_t sum = 0;
    for (int64_t w = 0; w < words; ++w) sum += std::popcount(bits[i * words + w]);
    popcounts[i] = sum;
  }
}

}  // namespace

HotEntries::HotEntries(const uint64_t* bits, int64_t num_entries, int64_t words,
                       int64_t min_activation)
    : bits_(bits), words_(words) {
  std::vector<int32_t> popcounts(num_entries);
  parallel_for(0, num_entries, 4096, [&](int64_t first, int64_t last) {
    count_bits(bits + first * words, last - first, words, popcounts.data() + first);
  });
  const auto is_hot = [&](int32_t popcount) { return popcount >= min_activation; };
  id_.reserve(std::count_if(popcounts.begin(), popcounts.end(), is_hot));
  for (int64_t i = 0; i < num_entries; ++i) {
    if (is_hot(popcounts[i])) id_.push_back(static_cast<int32_t>(i));
  }
  std::sort(id_.begin(), id_.end(), [&](int32_t a, int32_t b) {
    return std::pair(popcounts[a], a) < std::pair(popcounts[b], b);
  });
  popcount_.reserve(id_.size());
  for (const int32_t id : id_) popcount_.push_back(popcounts[id]);
}

SignatureBlocks::SignatureBlocks(const HotEntries& hot, std::vector<int32_t> slots)
    : block_words_(hot.words() * kLanes), slots_(std::move(slots)) {
  popcounts_.reserve(slots_.size());
  for (const int32_t slot : slots_) popcounts_.push_back(hot.popcount(slot));
  blocks_.resize(blocks_for(count()) * block_words_, 0);
  parallel_for(0, count(), 512 * kLanes, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      copy_to_blocks(hot.row(slots_[i]), hot.words(), i, blocks_.data());
    }
  });
}

bool SignatureBlocks::contains(int32_t slot) const {
  return std::binary_search(slots_.begin(), slots_.end(), slot);
}

Range within_reach(const std::vector<int32_t>& popcounts, int32_t f_i,
                   const std::vector<int32_t>& thresholds) {
  // f_ij is at most the smaller popcount.
  const auto begin = std::partition_point(popcounts.begin(), popcounts.end(), [&](int32_t f_j) {
    return f_j < f_i && thresholds[f_j] > f_j;
  });
  const auto end = std::partition_point(
      begin, popcounts.end(), [&](int32_t f_j) { return f_j <= f_i || thresholds[f_j] <= f_i; });
  return {begin - popcounts.begin(), end - popcounts.begin()};
}

}  // namespace swarm_kv
