#include "core/numeric.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/flush_denormals.h"
#include "core/simd.h"

namespace swarm_kv {
namespace {

// IEEE 754 half precision by its definition.
double half_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  double value;
  if (exponent == 31) {
    value = mantissa ? std::nan("") : std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, -24);
  } else {
    value = std::ldexp(1024 + mantissa, exponent - 25);
  }
  return bits & 0x8000 ? -value : value;
}

bool same_float(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
}

TEST(Fp16, DecodesEveryPattern) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    ASSERT_TRUE(same_float(fp16::from_bits(half), static_cast<float>(half_value(half)))) << bits;
  }
}

TEST(Fp16, EncodesEveryValueToItself) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = fp16::from_bits(static_cast<uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(static_cast<float>(fp16(value))));
    } else {
      ASSERT_EQ(fp16(value).bits, bits);
    }
  }
}

TEST(Fp16, RoundsToNearestEven) {
  for (uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const double low = half_value(static_cast<uint16_t>(bits));
    const double high = half_value(static_cast<uint16_t>(bits + 1));
    const float middle = static_cast<float>((low + high) / 2);
    ASSERT_EQ(fp16(middle).bits, bits % 2 == 0 ? bits : bits + 1);
    ASSERT_EQ(fp16(std::nextafter(middle, 0.0f)).bits, bits);
    ASSERT_EQ(fp16(std::nextafter(middle, 1e9f)).bits, bits + 1);
  }
  EXPECT_EQ(fp16(65519.996f).bits, 0x7bff);
  EXPECT_EQ(fp16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(fp16(-1e30f).bits, 0xfc00);
  EXPECT_EQ(fp16(-1e-30f).bits, 0x8000);
}

TEST(Bf16, IsTheUpperHalfOfAFloat) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = std::bit_cast<float>(bits << 16);
    const bf16 half = bf16::from_bits(static_cast<uint16_t>(bits));
    ASSERT_TRUE(same_float(half, value));
    if (std::isnan(value)) continue;
    ASSERT_EQ(bf16(value).bits, bits);
  }
  EXPECT_TRUE(std::isnan(static_cast<float>(bf16(std::bit_cast<float>(0x7f800001u)))));
}

TEST(Bf16, RoundsToNearestEven) {
  EXPECT_EQ(bf16(std::bit_cast<float>(0x3f808000u)).bits, 0x3f80);
  EXPECT_EQ(bf16(std::bit_cast<float>(0x3f818000u)).bits, 0x3f82);
  EXPECT_EQ(bf16(std::bit_cast<float>(0x3f808001u)).bits, 0x3f81);
  EXPECT_EQ(bf16(std::numeric_limits<float>::max()).bits, 0x7f80);
}

// Odd counts exercise the tails of vectorised loops; the value after the end must survive.
template <typename Source>
void expect_bulk_matches(const std::vector<Source>& source) {
  for (const size_t count : {size_t{0}, size_t{1}, size_t{7}, size_t{33}, source.size()}) {
    std::vector<float> out(count + 1, 12345.0f);
    to_float(source.data(), out.data(), static_cast<int64_t>(count));
    for (size_t i = 0; i < count; ++i) {
      ASSERT_TRUE(same_float(out[i], static_cast<float>(source[i]))) << i;
    }
    EXPECT_EQ(out[count], 12345.0f);
  }
}

TEST(ToFloat, BulkMatchesScalar) {
  std::vector<fp16> halves;
  std::vector<bf16> brains;
  std::vector<float> floats;
  std::vector<double> doubles;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    halves.push_back(fp16::from_bits(static_cast<uint16_t>(bits)));
    brains.push_back(bf16::from_bits(static_cast<uint16_t>(bits)));
    floats.push_back(static_cast<float>(bits) * 0.1f);
    doubles.push_back(bits * 0.1);
  }
  expect_bulk_matches(halves);
  expect_bulk_matches(brains);
  expect_bulk_matches(floats);
  expect_bulk_matches(doubles);
}

template <typename Target>
void expect_bulk_narrows(const std::vector<float>& source) {
  for (const size_t count : {size_t{0}, size_t{1}, size_t{7}, size_t{33}, source.size()}) {
    std::vector<Target> out(count + 1, Target(123.0f));
    from_float(source.data(), out.data(), static_cast<int64_t>(count));
    for (size_t i = 0; i < count; ++i) {
      const Target expected(source[i]);
      ASSERT_TRUE(same_float(out[i], expected)) << source[i];
    }
    EXPECT_EQ(static_cast<float>(out[count]), 123.0f);
  }
}

TEST(ToFloat, RowsAnywhereBecomeDenseOnes) {
  std::vector<fp16> pool;
  for (uint32_t i = 0; i < 3000; ++i)
    pool.push_back(fp16::from_bits(static_cast<uint16_t>(i * 29)));
  const std::vector<int64_t> starts{1700, 0, 3, 2950, 3};
  for (const int64_t count : {1, 7, 8, 9, 16, 50}) {
    std::vector<float> dense(starts.size() * count + 1, -1.0f);
    to_float_rows(pool.data(), starts.data(), static_cast<int64_t>(starts.size()), dense.data(),
                  count);
    for (size_t r = 0; r < starts.size(); ++r) {
      for (int64_t i = 0; i < count; ++i) {
        EXPECT_TRUE(same_float(dense[r * count + i], fp16::decode(pool[starts[r] + i].bits)))
            << count << " numbers, row " << r << ", " << i;
      }
    }
    EXPECT_EQ(dense.back(), -1.0f);
  }
}

TEST(FromFloat, BulkMatchesScalar) {
  // All magnitudes of halves and beyond, between them and halfway; infinity and NaN.
  std::vector<float> values;
  for (uint32_t bits = 0; bits < 0x47900000u; bits += 0x2001u) {
    values.push_back(std::bit_cast<float>(bits));
    values.push_back(-std::bit_cast<float>(bits + 0xfffu));
  }
  for (uint32_t bits = 0; bits < 0x7c00u; ++bits) {
    const auto low = static_cast<float>(half_value(static_cast<uint16_t>(bits)));
    const auto high = static_cast<float>(half_value(static_cast<uint16_t>(bits + 1)));
    values.push_back((low + high) / 2);
  }
  values.push_back(std::numeric_limits<float>::infinity());
  values.push_back(-std::numeric_limits<float>::max());
  values.push_back(std::nanf(""));
  expect_bulk_narrows<fp16>(values);
  expect_bulk_narrows<bf16>(values);
  expect_bulk_narrows<float>(values);
  expect_bulk_narrows<double>(values);
}

TEST(LargestMagnitude, FindsOneValueAnywhere) {
  std::vector<float> values(75, -3.0f);
  values[4] = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(largest_magnitude(values.data(), 75), 3.0f);
  EXPECT_EQ(largest_magnitude(values.data(), 0), 0.0f);
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float extreme : {3.5f, -std::numeric_limits<float>::max(), infinity, -infinity,
                              std::nanf(""), -std::nanf("")}) {
    for (size_t i = 0; i < values.size(); ++i) {
      std::vector<float> copy = values;
      copy[i] = extreme;
      const float found = largest_magnitude(copy.data(), 75);
      ASSERT_TRUE(found == std::abs(extreme) || (std::isnan(found) && std::isnan(extreme)))
          << i << " " << extreme << " " << found;
    }
  }
}

TEST(FastExp, RelativeErrorIsBelow2e7) {
  double worst = 0.0;
  for (uint32_t bits = 0x80000000u; bits <= 0xc2aeac4fu; bits += 997) {  // -0 to -87.3365
    const float x = std::bit_cast<float>(bits);
    const double expected = std::exp(static_cast<double>(x));
    worst = std::max(worst, std::abs(fast_expf(x) - expected) / expected);
  }
  EXPECT_LT(worst, 2e-7);
  EXPECT_GT(worst, 0.0);
}

TEST(FastExp, Limits) {
  EXPECT_EQ(fast_expf(0.0f), 1.0f);
  EXPECT_EQ(fast_expf(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_EQ(fast_expf(-std::numeric_limits<float>::max()), 0.0f);
  EXPECT_EQ(fast_expf(-88.0f), 0.0f);
  EXPECT_GT(fast_expf(-87.3f), 0.0f);
  EXPECT_TRUE(std::isnan(fast_expf(std::nanf(""))));
}

TEST(FlushDenormals, TakesThemForZeroWhileItLives) {
  // Not known to the compiler, which would do the arithmetic itself.
  volatile float least = std::numeric_limits<float>::min(), half = 0.5f;
  volatile double least_double = std::numeric_limits<double>::min();
  const auto halves_to_zero = [&] { return least * half == 0 && least_double * half == 0; };
  EXPECT_FALSE(halves_to_zero());
#ifdef __SSE__
  {
    const FlushDenormals flush;
    EXPECT_TRUE(halves_to_zero());
    {
      const FlushDenormals within;
    }
    EXPECT_TRUE(halves_to_zero());
    EXPECT_EQ(least * 2, 2 * std::numeric_limits<float>::min());
  }
  EXPECT_FALSE(halves_to_zero());
#endif
}

}  // namespace
}  // namespace swarm_kv
