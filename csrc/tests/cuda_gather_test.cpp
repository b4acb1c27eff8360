// The CUDA kernels that bring entries into the attention's pool, in emulation: copies against
// memcpy, codes against the codecs.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/codec.h"
#include "cuda_rig.h"
#include "ops/cuda/gather.h"

namespace swarm_kv::cuda {
namespace {

// `count` places of `bytes` bytes that do not overlap, in units of `unit`; `size` becomes what they
// need.
std::vector<int64_t> places(Generator& random, int64_t count, int64_t bytes, int64_t unit,
                            int64_t& size) {
  const int64_t step = (bytes + unit - 1) / unit + random.integer(0, 2);
  std::vector<int64_t> result(count);
  for (int64_t i = 0; i < count; ++i) result[i] = i * step;
  for (int64_t i = count; i > 1; --i) std::swap(result[i - 1], result[random.integer(0, i - 1)]);
  size = count == 0 ? 0 : (count - 1) * step * unit + bytes;
  return result;
}

std::vector<std::byte> noise(Generator& random, int64_t count) {
  std::vector<std::byte> result(count);
  for (std::byte& value : result) value = static_cast<std::byte>(random.integer(0, 255));
  return result;
}

TEST(CudaGather, EqualsMemcpy) {
  for (unsigned seed = 0; seed < kCases; ++seed) {
    Generator random(seed);
    const int64_t unit = random.one_of({1, 2, 4, 16});
    const int64_t bytes =
        random.one_of({1, 15, 16, 17, 64, 130, 512, 4096, 4100, random.integer(1, 9000)});
    const int64_t count = random.one_of({0, 1, 2, 5, 9});
    const bool dense = random.chance(0.3);
    int64_t source_size, target_size;
    const std::vector<int64_t> from = places(random, count, bytes, unit, source_size);
    const std::vector<int64_t> to = places(random, count, bytes, unit, target_size);
    if (dense) target_size = count * bytes;
    const int64_t source_shift = random.one_of({0, 0, 1, 2, 4, 8});
    const int64_t target_shift = random.one_of({0, 0, 1, 2, 4, 8});
    const std::vector<std::byte> source = noise(random, source_shift + source_size);
    std::vector<std::byte> target = noise(random, target_shift + target_size), expected = target;
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(expected.data() + target_shift + (dense ? i * bytes : to[i] * unit),
                  source.data() + source_shift + from[i] * unit, bytes);
    }
    const Entries entries{source.data() + source_shift,
                          source_size,
                          from.data(),
                          target.data() + target_shift,
                          target_size,
                          dense ? nullptr : to.data(),
                          count,
                          unit};
    EXPECT_EQ(gather_entries(entries, bytes, nullptr), cudaSuccess);
    ASSERT_TRUE(target == expected) << "case " << seed << ": " << count << " entries of " << bytes;
  }
}

TEST(CudaGather, WhatReachesOutsideIsNotReadOrWritten) {
  const std::vector<std::byte> source(64, std::byte{1});
  const std::vector<std::byte> ones(16, std::byte{0xff});
  for (const int64_t from : {0, 49, -1}) {
    for (const int64_t to : {8, 17, -1}) {
      std::vector<std::byte> target(32, std::byte{2}), expected = target;
      const Entries entries{source.data(), 64, &from, target.data(), 32, &to, 1, 1};
      EXPECT_EQ(gather_entries(entries, 16, nullptr), cudaSuccess);
      if (to == 8) std::copy_n(from == 0 ? source.data() : ones.data(), 16, expected.data() + 8);
      EXPECT_TRUE(target == expected) << from << ", " << to;
    }
  }
}

template <typename T>
constexpr Element kElement = std::is_same_v<T, fp16>   ? Element::kFloat16
                             : std::is_same_v<T, bf16> ? Element::kBFloat16
                                                       : Element::kFloat32;

// How much entries that a codec stored differ, decoded by it and by the kernel, which gets another
// code when it is `damaged`.
template <typename T>
double difference_of(Generator& random, const char* name, bool damaged) {
  Coding coding{};
  coding.code = std::string(name) == "int8" ? Coding::Code::kInt8 : Coding::Code::kKivi4;
  coding.heads = random.one_of({1, 2, 3, 8});
  coding.dim = random.one_of({64, 128, 256, 80, 5, 33, 1});
  coding.element = kElement<T>;
  const int64_t half = coding.heads * coding.dim, size = 2 * half * sizeof(T);
  const int64_t count = random.one_of({1, 1, 2, 5});
  const std::vector<T> keys = random.normal<T>(count * half),
                       values = random.normal<T>(count * half);
  const auto side = [&](const std::vector<T>& numbers) {
    return EntrySource::Half{reinterpret_cast<const std::byte*>(numbers.data()),
                             static_cast<int64_t>(coding.dim * sizeof(T)),
                             static_cast<int64_t>(half * sizeof(T))};
  };
  const EntrySource all{side(keys), side(values), coding.heads,
                        static_cast<int64_t>(coding.dim * sizeof(T)), kElement<T>};
  const std::unique_ptr<Codec> codec = make_codec(name, all, count);
  EXPECT_EQ(code_bytes(coding), codec->stored_bytes());
  coding.channels = codec->channels().data();

  const int64_t unit = random.one_of({1, 2, 16}) * sizeof(T);
  int64_t source_size, target_size;
  const std::vector<int64_t> from = places(random, count, codec->stored_bytes(), unit, source_size);
  const std::vector<int64_t> to = places(random, count, size, unit, target_size);
  const int64_t shift = random.integer(0, 15);
  std::vector<std::byte> source = noise(random, shift + source_size), entry(size);
  std::vector<T> target(target_size / sizeof(T), T(7.0f)), expected = target;
  for (int64_t i = 0; i < count; ++i) {
    std::byte* code = source.data() + shift + from[i] * unit;
    all.assemble(i, entry.data());
    codec->encode(entry.data(), code);
    codec->decode(code, reinterpret_cast<std::byte*>(expected.data()) + to[i] * unit);
  }
  const Entries entries{source.data() + shift, source_size, from.data(), target.data(),
                        target_size,           to.data(),   count,       unit};
  // The last byte of a code is a number.
  const int64_t last = shift + from[0] * unit + codec->stored_bytes() - 1;
  if (damaged) source[last] ^= std::byte{0x70};
  EXPECT_EQ(decode_entries(entries, coding, nullptr), cudaSuccess);
  return difference(target, expected);
}

template <typename T>
class CudaDecode : public testing::Test {};
using Elements = testing::Types<float, fp16, bf16>;
TYPED_TEST_SUITE(CudaDecode, Elements);

TYPED_TEST(CudaDecode, EqualsTheCodec) {
  const double tolerance = std::is_same_v<TypeParam, float> ? 1e-5 : 2e-2;
  for (const char* name : {"int8", "kivi4"}) {
    for (unsigned seed = 0; seed < kCases / 2; ++seed) {
      Generator random(seed);
      ASSERT_LE(difference_of<TypeParam>(random, name, false), tolerance)
          << name << ", case " << seed;
    }
  }
}

TYPED_TEST(CudaDecode, AnotherCodeShows) {
  int shown = 0;
  for (unsigned seed = 0; seed < 20; ++seed) {
    Generator random(seed);
    shown += difference_of<TypeParam>(random, "int8", true) > 2e-2 ? 1 : 0;
  }
  EXPECT_EQ(shown, 20);
}

TEST(CudaDecodeLimits, LongCodesAreRefused) {
  Coding coding{};
  coding.heads = 256;
  coding.dim = 256;
  Entries entries{};
  entries.count = 1;
  EXPECT_EQ(decode_entries(entries, coding, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace swarm_kv::cuda
