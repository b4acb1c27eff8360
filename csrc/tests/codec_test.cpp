#include "core/codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "io/error.h"

namespace swarm_kv {
namespace {

// Random entries whose key channels differ in size and offset, as keys of models do.
struct Entries {
  int64_t count;
  int64_t heads;
  int64_t dim;
  Element element;
  std::vector<std::byte> keys;
  std::vector<std::byte> values;

  Entries(int64_t count, int64_t heads, int64_t dim, Element element, float key_outlier = 20.0f)
      : count(count), heads(heads), dim(dim), element(element) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    std::vector<float> k(count * heads * dim);
    std::vector<float> v(k.size());
    for (int64_t i = 0; i < static_cast<int64_t>(k.size()); ++i) {
      const int64_t channel = i % dim;
      const float size = channel % 16 == 3 ? key_outlier : 1.0f;
      k[i] = size * (1.0f + 0.2f * normal(random));
      v[i] = normal(random);
    }
    keys.resize(k.size() * size_of(element));
    values.resize(keys.size());
    from_float(element, k.data(), keys.data(), static_cast<int64_t>(k.size()));
    from_float(element, v.data(), values.data(), static_cast<int64_t>(v.size()));
  }

  // [heads, count, dim], as an operator gets them.
  EntrySource source() const {
    const int64_t item = size_of(element);
    return {{keys.data(), count * dim * item, dim * item},
            {values.data(), count * dim * item, dim * item},
            heads,
            dim * item,
            element};
  }

  std::vector<float> plain(int64_t n) const {
    std::vector<std::byte> bytes(source().entry_bytes());
    source().assemble(n, bytes.data());
    std::vector<float> numbers(2 * heads * dim);
    to_float(element, bytes.data(), numbers.data(), static_cast<int64_t>(numbers.size()));
    return numbers;
  }

  std::vector<float> through(Codec& codec, int64_t n) const {
    std::vector<std::byte> bytes(source().entry_bytes());
    source().assemble(n, bytes.data());
    // One byte more than the code may use, to see that it is left alone.
    std::vector<std::byte> code(codec.stored_bytes() + 1, std::byte{0xaa});
    codec.encode(bytes.data(), code.data());
    EXPECT_EQ(code.back(), std::byte{0xaa});
    std::fill(bytes.begin(), bytes.end(), std::byte{0});
    codec.decode(code.data(), bytes.data());
    std::vector<float> numbers(2 * heads * dim);
    to_float(element, bytes.data(), numbers.data(), static_cast<int64_t>(numbers.size()));
    return numbers;
  }
};

struct Errors {
  double keys = 0;
  double values = 0;
};

// Root mean square error relative to each half's root mean square about its channel means.
Errors errors(const Entries& entries, Codec& codec) {
  const int64_t half = entries.heads * entries.dim;
  std::vector<double> mean(2 * half, 0.0);
  for (int64_t n = 0; n < entries.count; ++n) {
    const auto plain = entries.plain(n);
    for (int64_t i = 0; i < 2 * half; ++i) mean[i] += plain[i] / static_cast<double>(entries.count);
  }
  double error[2] = {};
  double power[2] = {};
  for (int64_t n = 0; n < entries.count; ++n) {
    const auto plain = entries.plain(n);
    const auto coded = entries.through(codec, n);
    for (int64_t i = 0; i < 2 * half; ++i) {
      error[i / half] += std::pow(plain[i] - coded[i], 2);
      power[i / half] += std::pow(plain[i] - mean[i], 2);
    }
  }
  return {std::sqrt(error[0] / power[0]), std::sqrt(error[1] / power[1])};
}

class CodecOfEveryType : public testing::TestWithParam<Element> {};

TEST_P(CodecOfEveryType, StaysWithinHalfAStep) {
  for (const int64_t dim : {64, 80, 33, 1}) {
    const Entries entries(50, 2, dim, GetParam());
    const auto codec = make_codec("int8", entries.source(), entries.count);
    for (int64_t n = 0; n < entries.count; ++n) {
      const auto plain = entries.plain(n);
      const auto coded = entries.through(*codec, n);
      for (int64_t row = 0; row < 2 * entries.heads; ++row) {
        float largest = 0;
        for (int64_t d = 0; d < dim; ++d) {
          largest = std::max(largest, std::abs(plain[row * dim + d]));
        }
        for (int64_t d = 0; d < dim; ++d) {
          // Half a step, the rounding of the scale, and that of the numbers themselves.
          EXPECT_NEAR(coded[row * dim + d], plain[row * dim + d], largest * (0.51 / 127 + 0.005));
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, CodecOfEveryType,
                         testing::Values(Element::kFloat16, Element::kBFloat16, Element::kFloat32,
                                         Element::kFloat64));

TEST(Codec, SizesAreWhatTheyPromise) {
  const Entries entries(10, 3, 64, Element::kFloat16);  // 768 bytes
  EXPECT_EQ(make_codec("none", entries.source(), 10), nullptr);
  EXPECT_EQ(make_codec("int8", entries.source(), 10)->stored_bytes(), 6 * (64 + 2));
  EXPECT_EQ(make_codec("kivi4", entries.source(), 10)->stored_bytes(), 12 * (16 + 4));
}

TEST(Codec, FourBitsHoldOutlierChannelsOfKeys) {
  const Entries entries(400, 2, 64, Element::kFloat32);
  const auto codec = make_codec("kivi4", entries.source(), entries.count);
  const Errors error = errors(entries, *codec);
  // 15 levels over about 4 deviations to either side.
  EXPECT_LT(error.keys, 0.12);
  EXPECT_LT(error.values, 0.12);
  EXPECT_GT(error.values, 0.01);  // control: it is lossy
  // Control: statistics of other channels do not fit, and one large channel takes all levels.
  const Entries flat(400, 2, 64, Element::kFloat32, 1.0f);
  auto other = make_codec("kivi4", flat.source(), flat.count);
  EXPECT_GT(errors(entries, *other).keys, 2 * error.keys);
}

TEST(Codec, ConstantAndEmptyInputAreExact) {
  Entries entries(3, 1, 40, Element::kFloat32);
  std::vector<float> same(3 * 40, 0.25f);
  from_float(Element::kFloat32, same.data(), entries.keys.data(), 120);
  from_float(Element::kFloat32, same.data(), entries.values.data(), 120);
  for (const char* name : {"int8", "kivi4"}) {
    const auto codec = make_codec(name, entries.source(), 3);
    for (const float number : entries.through(*codec, 1)) EXPECT_NEAR(number, 0.25f, 1e-3f) << name;
  }
  EXPECT_NE(make_codec("kivi4", entries.source(), 0), nullptr);
}

TEST(Codec, ChannelsGiveTheSameCodec) {
  const Entries entries(20, 3, 40, Element::kFloat32);
  const Entries others(20, 3, 40, Element::kFloat32, 2.0f);
  for (const char* name : {"int8", "kivi4"}) {
    const auto codec = make_codec(name, entries.source(), entries.count);
    const auto again = make_codec(name, Element::kFloat32, 3, 40, codec->channels());
    EXPECT_EQ(again->stored_bytes(), codec->stored_bytes());
    for (int64_t n = 0; n < entries.count; ++n) {
      EXPECT_EQ(entries.through(*again, n), entries.through(*codec, n)) << name << " " << n;
    }
    // Control: channels matter where there are any.
    const auto other = make_codec(name, Element::kFloat32, 3, 40,
                                  make_codec(name, others.source(), others.count)->channels());
    EXPECT_EQ(entries.through(*other, 0) == entries.through(*codec, 0),
              name == std::string("int8"));
    std::vector<float> wrong(codec->channels().size() + 1);
    EXPECT_THROW(make_codec(name, Element::kFloat32, 3, 40, wrong), Error);
  }
  EXPECT_THROW(make_codec("zip", Element::kFloat32, 3, 40, {}), Error);
}

TEST(Codec, RefusesWhatItCannotHold) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 1e30f}) {
    for (const char* name : {"int8", "kivi4"}) {
      Entries entries(3, 1, 32, Element::kFloat32);
      from_float(Element::kFloat32, &bad, entries.values.data() + 4 * 32, 1);
      const auto codec = make_codec(name, entries.source(), 3);
      EXPECT_NO_THROW(entries.through(*codec, 0));
      EXPECT_THROW(entries.through(*codec, 1), Error) << name << " " << bad;
    }
    Entries entries(3, 1, 32, Element::kFloat32);
    from_float(Element::kFloat32, &bad, entries.keys.data(), 1);
    EXPECT_THROW(make_codec("kivi4", entries.source(), 3), Error);
  }
}

TEST(Codec, UnknownNameListsTheKnownOnes) {
  const Entries entries(1, 1, 32, Element::kFloat32);
  try {
    make_codec("zip", entries.source(), 1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "unknown `codec` \"zip\"; choose one of: none, int8, kivi4");
  }
}

}  // namespace
}  // namespace swarm_kv
