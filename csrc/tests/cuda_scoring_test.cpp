// Scores on the emulated GPU equal those of the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/nibble_scan.h"
#include "cuda_rig.h"
#include "ops/cpu/scoring.h"
#include "ops/cuda/scoring.h"

namespace swarm_kv::cuda {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Case {
  int64_t kv_heads, rows, dim, items;
  float scale;
  std::vector<float> q;

  ScoreQueries queries() const { return {q.data(), kv_heads, rows, dim}; }
};

// dim is `parts` times one to twelve features.
Case random_case(Generator& random, int64_t parts) {
  Case c;
  c.kv_heads = random.integer(1, 2);
  c.rows = random.one_of({1, 2, 3, 7, 8, 9});
  c.dim = parts * random.integer(1, 12);
  // Now and then more than the keys, or the codes, of one block.
  c.items = random.chance(0.9) ? random.one_of({1, 2, 3, 31, 32, 33, 63, 64, 66})
                               : random.one_of({127, 128, 129, 1025});
  c.q = random.normal(c.kv_heads * c.rows * c.dim);
  // Scores of a few units, now and then of dozens; or all equal.
  const float spread = random.chance(0.2) ? 8.0f : 2.0f;
  c.scale = random.chance(0.05) ? 0.0f : spread / std::sqrt(static_cast<float>(c.dim));
  return c;
}

bool close(const std::vector<float>& got, const std::vector<float>& wanted, float tolerance) {
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (std::isnan(wanted[i]) != std::isnan(got[i])) return false;
    if (std::abs(got[i] - wanted[i]) > tolerance * wanted[i] + 1e-12f) return false;
  }
  return got.size() == wanted.size();
}

// What goes wrong first, for the message.
std::string worst_item(const std::vector<float>& got, const std::vector<float>& wanted) {
  size_t worst = 0;
  float by = -1;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const float off = std::abs(got[i] / wanted[i] - 1);
    if (off > by || std::isnan(off)) worst = i, by = off;
  }
  return "item " + std::to_string(worst) + " is " + std::to_string(got[worst]) + ", not " +
         std::to_string(wanted[worst]) + ", off by " + std::to_string(by);
}

#define EXPECT_CLOSE(got, wanted, tolerance, c)                                            \
  EXPECT_TRUE(close(got, wanted, tolerance))                                               \
      << worst_item(got, wanted) << "; kv_heads " << (c).kv_heads << ", rows " << (c).rows \
      << ", dim " << (c).dim << ", items " << (c).items

template <typename T>
constexpr Element kElement = std::is_same_v<T, float>  ? Element::kFloat32
                             : std::is_same_v<T, fp16> ? Element::kFloat16
                                                       : Element::kBFloat16;

template <typename T>
std::vector<float> gpu_keys(const Case& c, const std::vector<T>& keys) {
  std::vector<float> out(c.items);
  const Scratch scratch(score_keys_scratch(c.queries(), c.items));
  EXPECT_EQ(score_keys(c.queries(), {keys.data(), kElement<T>}, c.items, c.scale, out.data(),
                       scratch.get(), nullptr),
            cudaSuccess);
  return out;
}

template <typename T>
std::vector<float> cpu_keys(const Case& c, const std::vector<T>& keys) {
  std::vector<float> out(c.items);
  cpu::score_keys(c.queries(), keys.data(), c.items, c.scale, out.data());
  return out;
}

template <typename T>
void compare_keys(const Case& c, const std::vector<float>& values) {
  std::vector<T> keys(values.begin(), values.end());
  EXPECT_CLOSE(gpu_keys(c, keys), cpu_keys(c, keys), 1e-5f, c);
}

TEST(CudaScoring, KeysOfEveryTypeScoreAsOnTheCpu) {
  for (unsigned seed = 0; seed < kCases; ++seed) {
    Generator random(seed);
    const Case c = random_case(random, random.one_of({1, 4, 11}));
    std::vector<float> keys = random.normal(c.kv_heads * c.items * c.dim);
    // Ties: keys that occur several times.
    for (int64_t i = 0; i + 2 * c.dim <= std::ssize(keys) && random.chance(0.5); i += c.dim) {
      std::copy_n(keys.begin() + i, c.dim, keys.begin() + i + c.dim);
    }
    compare_keys<float>(c, keys);
    if (seed % 4 == 1) compare_keys<fp16>(c, keys);
    if (seed % 4 == 3) compare_keys<bf16>(c, keys);
    if (HasFailure()) FAIL() << "seed " << seed;
  }
}

template <typename T>
void compare_turns(const Case& c, const std::vector<float>& values) {
  const std::vector<T> turn(values.begin(), values.end());
  std::vector<float> got(c.q.size()), wanted(c.q.size());
  EXPECT_EQ(turn_queries(c.queries(), {turn.data(), kElement<T>}, got.data(), nullptr),
            cudaSuccess);
  cpu::turn_queries(c.queries(), turn.data(), wanted.data());
  EXPECT_LT(difference(got, wanted), 1e-5);
  if (c.dim > 1) {
    std::swap(got.front(), got.back());
    EXPECT_GT(difference(got, wanted), 1e-5);  // the negative control
  }
}

TEST(CudaScoring, QueriesTurnAsOnTheCpu) {
  for (unsigned seed = 0; seed < kCases; ++seed) {
    Generator random(seed);
    const Case c = random_case(random, random.one_of({1, 4, 16}));
    const std::vector<float> turn = random.normal(c.kv_heads * c.dim * c.dim);
    compare_turns<float>(c, turn);
    if (seed % 4 == 1) compare_turns<fp16>(c, turn);
    if (seed % 4 == 3) compare_turns<bf16>(c, turn);
    if (HasFailure()) FAIL() << "seed " << seed;
  }
}

TEST(CudaScoring, ScoresOfMinusInfinityCountForNothing) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Generator random(seed);
    Case c = random_case(random, 1);
    c.scale = 1;
    for (int64_t i = 0; i < std::ssize(c.q); i += c.dim) c.q[i] = 1 + std::abs(c.q[i]);
    std::vector<float> keys = random.normal(c.kv_heads * c.items * c.dim, 0.5f);
    const double share = random.chance(0.3) ? 1.0 : 0.5;
    for (int64_t i = 0; i < c.kv_heads * c.items; ++i) {
      if (random.chance(share)) keys[i * c.dim] = -kInfinity;
    }
    const std::vector<float> out = gpu_keys(c, keys);
    EXPECT_CLOSE(out, cpu_keys(c, keys), 1e-5f, c);
    // A softmax of nothing is not a number, here as there.
    if (share == 1.0) {
      EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](float x) { return std::isnan(x); }));
    }
  }
}

TEST(CudaScoring, CodedKeysScoreAsOnTheCpu) {
  for (unsigned seed = 0; seed < kCases; ++seed) {
    Generator random(seed);
    const Case c = random_case(random, 2 * random.integer(1, 8));
    const std::vector<uint8_t> keys = random.bytes(c.kv_heads * c.items * c.dim / 2);
    const std::vector<float> scales = random.normal(c.kv_heads * c.dim, 0.1f);
    std::vector<float> out(c.items), wanted(c.items);
    const Scratch scratch(score_coded_keys_scratch(c.queries(), c.items));
    ASSERT_EQ(score_coded_keys(c.queries(), keys.data(), scales.data(), c.items, c.scale,
                               out.data(), scratch.get(), nullptr),
              cudaSuccess);
    cpu::score_coded_keys(c.queries(), keys.data(), scales.data(), c.items, c.scale, wanted.data());
    EXPECT_CLOSE(out, wanted, 1e-5f, c);
    if (HasFailure()) FAIL() << "seed " << seed;
  }
}

struct Codes {
  int64_t parts, codewords;
  std::vector<float> codebooks;
  std::vector<uint8_t> codes;
};

std::vector<float> gpu_codes(const Case& c, const Codes& coded) {
  std::vector<float> out(c.items);
  const Scratch scratch(score_codes_scratch(c.queries(), coded.parts, coded.codewords, c.items));
  EXPECT_EQ(score_codes(c.queries(), coded.codebooks.data(), coded.parts, coded.codewords,
                        coded.codes.data(), c.items, c.scale, out.data(), scratch.get(), nullptr),
            cudaSuccess);
  return out;
}

std::vector<float> cpu_codes(const Case& c, const Codes& coded) {
  std::vector<float> out(c.items);
  cpu::score_codes(c.queries(), coded.codebooks.data(), coded.parts, coded.codewords,
                   coded.codes.data(), c.items, c.scale, out.data());
  return out;
}

TEST(CudaScoring, CodesScoreAsOnTheCpu) {
  for (unsigned seed = 0; seed < kCases; ++seed) {
    Generator random(seed);
    Codes coded;
    coded.parts = random.integer(1, 9);
    coded.codewords = random.one_of({1, 3, 16, 200, 256, 256});
    const Case c = random_case(random, coded.parts);
    coded.codebooks = random.normal(c.kv_heads * coded.codewords * c.dim);
    coded.codes =
        random.bytes(c.kv_heads * coded.parts * c.items, static_cast<int>(coded.codewords) - 1);
    if (random.chance(0.1)) coded.codebooks[0] = -kInfinity;
    EXPECT_CLOSE(gpu_codes(c, coded), cpu_codes(c, coded), 1e-5f, c);
    if (HasFailure()) FAIL() << "seed " << seed;
  }
}

TEST(CudaScoring, OneOtherCodeShows) {
  Generator random(7);
  Case c = random_case(random, 4);
  c.scale = 1;
  Codes coded{4, 256, random.normal(c.kv_heads * 256 * c.dim),
              random.bytes(c.kv_heads * 4 * c.items)};
  const std::vector<float> wanted = cpu_codes(c, coded);
  ASSERT_TRUE(close(gpu_codes(c, coded), wanted, 1e-5f));
  coded.codes.back() ^= 1;
  EXPECT_FALSE(close(gpu_codes(c, coded), wanted, 1e-5f));
}

TEST(CudaScoring, ResultsDoNotDependOnTheOrderOfThreads) {
  Generator random(3);
  Case c = random_case(random, 6);
  c.items = 1100;
  const Codes coded{6, 256, random.normal(c.kv_heads * 256 * c.dim),
                    random.bytes(c.kv_heads * 6 * c.items)};
  const std::vector<float> keys = random.normal(c.kv_heads * c.items * c.dim);
  const std::vector<float> by_codes = gpu_codes(c, coded), by_keys = gpu_keys(c, keys);
  for (uint64_t seed = 0; seed < 4; ++seed) {
    emulation::set_seed(seed);
    EXPECT_EQ(gpu_codes(c, coded), by_codes);
    EXPECT_EQ(gpu_keys(c, keys), by_keys);
  }
}

// The definition: tables rounded as the header says, and then an exact softmax.
std::vector<float> rounded_scores(const Case& c, const Codes& coded) {
  const int64_t part_dim = c.dim / coded.parts;
  std::vector<double> mean(c.items, 0.0);
  for (int64_t row = 0; row < c.kv_heads * c.rows; ++row) {
    const int64_t kv = row / c.rows;
    std::vector<float> table(coded.parts * 16, 0.0f), lowest(coded.parts);
    float range = 0;
    for (int64_t m = 0; m < coded.parts; ++m) {
      for (int64_t k = 0; k < 16; ++k) {
        for (int64_t d = 0; d < part_dim; ++d) {
          const float q = c.scale * c.q[row * c.dim + m * part_dim + d];
          table[m * 16 + k] +=
              q * coded.codebooks[((kv * coded.parts + m) * 16 + k) * part_dim + d];
        }
      }
      const auto [low, high] = std::minmax_element(&table[m * 16], &table[m * 16] + 16);
      lowest[m] = *low;
      range = std::max(range, *high - *low);
    }
    const float per_step = range > 0 ? kScanTableMax / range : 0;
    std::vector<double> scores(c.items, 0.0);
    for (int64_t m = 0; m < coded.parts; ++m) {
      for (int64_t n = 0; n < c.items; ++n) {
        const uint8_t both = coded.codes[(kv * coded.parts / 2 + m / 2) * c.items + n];
        const float value = table[m * 16 + (m % 2 == 0 ? both & 15 : both >> 4)];
        scores[n] +=
            std::floor(std::min((value - lowest[m]) * per_step + 0.5f, kScanTableMax + 0.5f));
      }
    }
    const double greatest = *std::max_element(scores.begin(), scores.end());
    const double step = static_cast<double>(range) / kScanTableMax;
    double sum = 0;
    for (double& score : scores) sum += score = std::exp((score - greatest) * step);
    for (int64_t n = 0; n < c.items; ++n) {
      mean[n] += scores[n] / sum / static_cast<double>(c.kv_heads * c.rows);
    }
  }
  return {mean.begin(), mean.end()};
}

TEST(CudaScoring, PackedCodesScoreByTheirRoundedTables) {
  for (unsigned seed = 0; seed < kCases; ++seed) {
    Generator random(seed);
    Codes coded;
    coded.parts = 2 * random.integer(1, 20);
    if (seed % 100 == 0) coded.parts = kScanMaxParts;
    coded.codewords = 16;
    Case c = random_case(random, coded.parts);
    if (coded.parts == kScanMaxParts) c.items = random.integer(1, 40);
    coded.codebooks = random.normal(c.kv_heads * 16 * c.dim);
    coded.codes = random.bytes(c.kv_heads * coded.parts / 2 * c.items);
    std::vector<float> out(c.items), wanted(c.items);
    const Scratch scratch(score_packed_codes_scratch(c.queries(), coded.parts, c.items));
    ASSERT_EQ(
        score_packed_codes(c.queries(), coded.codebooks.data(), coded.parts, coded.codes.data(),
                           c.items, c.scale, out.data(), scratch.get(), nullptr),
        cudaSuccess);
    EXPECT_CLOSE(out, rounded_scores(c, coded), 1e-5f, c);
    // The CPU's exponentials are within one per cent.
    cpu::score_packed_codes(c.queries(), coded.codebooks.data(), coded.parts, coded.codes.data(),
                            c.items, c.scale, wanted.data());
    EXPECT_CLOSE(wanted, out, 2e-2f, c);
    if (HasFailure()) FAIL() << "seed " << seed;
  }
}

TEST(CudaScoring, TheGreatestCodeIsFound) {
  Generator random(1);
  for (int64_t count : {0, 1, 255, 256, 257, 3000}) {
    std::vector<uint8_t> codes = random.bytes(count, 99);
    if (count > 0) codes[random.integer(0, count - 1)] = 123;
    int32_t greatest = -1;
    ASSERT_EQ(max_code(codes.data(), count, &greatest, nullptr), cudaSuccess);
    EXPECT_EQ(greatest, count == 0 ? 0 : 123);
  }
}

}  // namespace
}  // namespace swarm_kv::cuda
