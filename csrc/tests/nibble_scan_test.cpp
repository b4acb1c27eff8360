#include "core/nibble_scan.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace swarm_kv {
namespace {

struct Case {
  int64_t rows, parts, count;
  std::vector<uint8_t> tables, codes;
  int64_t plane() const { return count + 3; }
  NibbleCodes view() const { return {codes.data(), plane(), parts}; }
};

Case random_case(int64_t rows, int64_t parts, int64_t count, unsigned seed) {
  Case result{rows, parts, count, {}, {}};
  std::mt19937 random(seed);
  std::uniform_int_distribution<int> value(0, kScanTableMax), byte(0, 255);
  result.tables.resize(rows * parts * 16);
  for (auto& x : result.tables) x = static_cast<uint8_t>(value(random));
  result.codes.resize(parts / 2 * result.plane());
  for (auto& x : result.codes) x = static_cast<uint8_t>(byte(random));
  return result;
}

std::vector<uint16_t> expected_sums(const Case& c, int64_t stride) {
  std::vector<uint16_t> sums(c.rows * stride, 7);
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t n = 0; n < c.count; ++n) {
      int sum = 0;
      for (int64_t m = 0; m < c.parts; ++m) {
        const uint8_t byte = c.codes[m / 2 * c.plane() + n];
        sum += c.tables[(r * c.parts + m) * 16 + (m % 2 == 0 ? byte % 16 : byte / 16)];
      }
      sums[r * stride + n] = static_cast<uint16_t>(sum);
    }
  }
  return sums;
}

class NibbleScan : public testing::TestWithParam<ScanLevel> {
 protected:
  void SetUp() override {
    if (!has_scan_level(GetParam())) GTEST_SKIP() << "not on this processor";
  }
};

TEST_P(NibbleScan, EqualsItsDefinition) {
  unsigned seed = 0;
  for (int64_t rows : {1, 2, 3, 4, 5, 8}) {
    for (int64_t parts : {2, 6, 32}) {
      for (int64_t count : {0, 1, 31, 32, 63, 64, 65, 200, 512}) {
        const Case c = random_case(rows, parts, count, ++seed);
        std::vector<uint16_t> sums(rows * 520, 7);
        scan_nibbles(GetParam(), c.tables.data(), rows, c.view(), count, sums.data(), 520);
        ASSERT_EQ(sums, expected_sums(c, 520)) << rows << ' ' << parts << ' ' << count;
      }
    }
  }
}

TEST_P(NibbleScan, HoldsTheGreatestSum) {
  const int64_t count = 100;
  Case c = random_case(1, kScanMaxParts, count, 1);
  std::fill(c.tables.begin(), c.tables.end(), static_cast<uint8_t>(kScanTableMax));
  std::vector<uint16_t> sums(count);
  scan_nibbles(GetParam(), c.tables.data(), 1, c.view(), count, sums.data(), count);
  EXPECT_EQ(sums, std::vector<uint16_t>(count, kScanMaxParts * kScanTableMax));
  static_assert(kScanMaxParts * kScanTableMax <= 65535 && kScanMaxParts % 2 == 0);
  static_assert((kScanMaxParts + 2) * kScanTableMax > 65535);
}

INSTANTIATE_TEST_SUITE_P(Levels, NibbleScan,
                         testing::Values(ScanLevel::kPortable, ScanLevel::kAvx2,
                                         ScanLevel::kAvx512));

TEST(NibbleScanLevel, AlwaysHasThePortableOne) {
  EXPECT_TRUE(has_scan_level(ScanLevel::kPortable));
  const Case c = random_case(3, 4, 90, 5);
  std::vector<uint16_t> sums(3 * 90, 7);
  scan_nibbles(c.tables.data(), 3, c.view(), 90, sums.data(), 90);
  EXPECT_EQ(sums, expected_sums(c, 90));
}

}  // namespace
}  // namespace swarm_kv
