#include "core/popcount.h"

#include <gtest/gtest.h>

#include <bitset>
#include <random>
#include <string>
#include <vector>

namespace swarm_kv {
namespace {

constexpr int64_t kBlocks = 3;

struct Case {
  std::vector<uint64_t> row;
  std::vector<std::vector<uint64_t>> signatures;
  std::vector<uint64_t> blocks;

  explicit Case(int64_t words, uint64_t bits_to_set, uint64_t seed) : row(words) {
    std::mt19937_64 random(seed);
    for (uint64_t& word : row) word = random() | bits_to_set;
    blocks.resize(kBlocks * kLanes * words);
    for (int64_t i = 0; i < kBlocks * kLanes; ++i) {
      std::vector<uint64_t>& signature = signatures.emplace_back(words);
      for (uint64_t& word : signature) word = random() | bits_to_set;
      copy_to_blocks(signature.data(), words, i, blocks.data());
    }
  }

  int32_t expected(int64_t signature) const {
    size_t sum = 0;
    for (size_t w = 0; w < row.size(); ++w) {
      sum += std::bitset<64>(row[w] & signatures[signature][w]).count();
    }
    return static_cast<int32_t>(sum);
  }
};

// Around the words that a kernel counts in bytes before it widens them, with all bits set at worst.
TEST(Popcount, KernelsAgreeWithCountingBits) {
  for (const int64_t words : {1, 2, 3, 16, 30, 31, 32, 33, 62, 63, 100, 1024}) {
    for (const uint64_t bits_to_set : {uint64_t{0}, ~uint64_t{0}}) {
      const Case input(words, bits_to_set, static_cast<uint64_t>(words));
      for (const PopcountKernel& kernel : popcount_kernels()) {
        std::vector<int32_t> common(kBlocks * kLanes + 1, -1);
        kernel.count_common(input.row.data(), input.blocks.data(), kBlocks, words, common.data());
        for (int64_t i = 0; i < kBlocks * kLanes; ++i) {
          ASSERT_EQ(common[i], input.expected(i)) << kernel.name << " " << words << " " << i;
        }
        ASSERT_EQ(common.back(), -1) << kernel.name << " wrote past its blocks";
      }
    }
  }
}

TEST(Popcount, NoWordsNoBits) {
  for (const PopcountKernel& kernel : popcount_kernels()) {
    std::vector<int32_t> common(kLanes, -1);
    kernel.count_common(nullptr, nullptr, 1, 0, common.data());
    EXPECT_EQ(common, std::vector<int32_t>(kLanes, 0)) << kernel.name;
  }
}

TEST(Popcount, TheFastestIsFirstAndThePortableLast) {
  const Case input(5, 0, 1);
  std::vector<int32_t> common(kBlocks * kLanes);
  count_common(input.row.data(), input.blocks.data(), kBlocks, 5, common.data());
  for (int64_t i = 0; i < kBlocks * kLanes; ++i) EXPECT_EQ(common[i], input.expected(i));
  EXPECT_EQ(popcount_kernels().back().name, std::string("portable"));
#ifdef __x86_64__
  size_t kernels = 1;
  kernels += __builtin_cpu_supports("avx2") ? 1 : 0;
  kernels += __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vpopcntdq");
  EXPECT_EQ(popcount_kernels().size(), kernels);
#endif
}

}  // namespace
}  // namespace swarm_kv
