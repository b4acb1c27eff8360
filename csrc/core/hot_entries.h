#pragma once

#include <cstdint>
#include <vector>

namespace swarm_kv {

// The entries that at least `min_activation` queries activate, in "slots" of ascending popcount
// (ties: ascending id), so that what can be within tau of a slot is a range of slots. Refers to
// `bits` [num_entries, words].
class HotEntries {
 public:
  HotEntries(const uint64_t* bits, int64_t num_entries, int64_t words, int64_t min_activation);

  int64_t count() const { return static_cast<int64_t>(id_.size()); }
  int64_t words() const { return words_; }
  int32_t id(int64_t slot) const { return id_[slot]; }
  int32_t popcount(int64_t slot) const { return popcount_[slot]; }
  const std::vector<int32_t>& popcounts() const { return popcount_; }
  int32_t max_popcount() const { return popcount_.empty() ? 0 : popcount_.back(); }
  const uint64_t* row(int64_t slot) const { return bits_ + id_[slot] * words_; }

 private:
  const uint64_t* bits_;
  int64_t words_;
  std::vector<int32_t> id_;
  std::vector<int32_t> popcount_;
};

// A copy of the signatures of some slots, ascending, in blocks for count_common.
class SignatureBlocks {
 public:
  SignatureBlocks(const HotEntries& hot, std::vector<int32_t> slots);

  int64_t count() const { return static_cast<int64_t>(slots_.size()); }
  bool contains(int32_t slot) const;
  int32_t slot(int64_t index) const { return slots_[index]; }
  // Ascending.
  const std::vector<int32_t>& popcounts() const { return popcounts_; }
  const uint64_t* block(int64_t block) const { return blocks_.data() + block * block_words_; }

 private:
  int64_t block_words_;
  std::vector<int32_t> slots_;
  std::vector<int32_t> popcounts_;
  std::vector<uint64_t> blocks_;
};

struct Range {
  int64_t begin;
  int64_t end;
};

// The range of `popcounts`, ascending, outside which nothing is within tau of a signature of f_i
// bits, given SignatureDistance::thresholds of f_i.
Range within_reach(const std::vector<int32_t>& popcounts, int32_t f_i,
                   const std::vector<int32_t>& thresholds);

}  // namespace swarm_kv
