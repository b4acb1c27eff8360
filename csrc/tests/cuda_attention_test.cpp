// The CUDA kernels of attention against the CPU's, in emulation.
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda_rig.h"
#include "ops/cpu/attention.h"
#include "ops/cuda/attention.h"
#include "ops/cuda/merge_attention.h"

namespace swarm_kv::cuda {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Result {
  std::vector<float> out;
  std::vector<float> lse;
};

template <typename T>
struct Case {
  int64_t rows, query_heads, kv_heads, dim, chunk;
  float scale, softcap;
  std::vector<T> q, pool;
  std::vector<int64_t> slots, row_offsets;
  std::vector<float> sinks;

  explicit Case(unsigned seed) {
    Generator random(seed);
    dim = random.one_of({64, 64, 128, 256});
    kv_heads = random.one_of({1, 1, 2, 3});
    const bool one_list = random.chance(0.2);  // new tokens of one sequence
    const bool many = one_list && random.chance(0.2);
    query_heads =
        kv_heads * (many ? random.one_of({1, 2, 4}) : random.one_of({1, 2, 3, 4, 7, 8, 9, 18}));
    rows = many ? 32 : random.integer(1, 4);
    scale = random.one_of<float>({0.05f, 0.1f, 0.3f});
    softcap = random.chance(0.3) ? 5.0f : 0.0f;
    if (random.chance(0.5)) sinks = random.normal(query_heads);

    const int64_t entry = 2 * kv_heads * dim;
    constexpr int64_t kAlign = 16 / sizeof(T);
    const int64_t entries = random.integer(1, 80);
    const int64_t gap = kAlign * random.one_of({0, 0, 1, 5});
    q = random.normal<T>(rows * query_heads * dim);
    pool = random.normal<T>(entries * (entry + gap) - gap);
    // Some keys that give a score of -inf to queries whose first feature is positive; or all keys.
    const double blocked = random.one_of<float>({0.0, 0.0, 0.2, 1.0});
    for (int64_t n = 0; n < entries; ++n) {
      if (!random.chance(blocked)) continue;
      for (int64_t h = 0; h < kv_heads; ++h) pool[n * (entry + gap) + h * dim] = T(-kInfinity);
    }
    if (blocked > 0) {
      for (int64_t i = 0; i < rows * query_heads; ++i) q[i * dim] = T(1.0f);
    }
    row_offsets.push_back(0);
    const int64_t common = random.integer(0, many ? 1 : 29);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t length =
          one_list ? common + r : random.one_of({0, 0, 1, 2, 15, 16, 17, 63, 64, 65});
      for (int64_t i = 0; i < length; ++i) {
        slots.push_back((one_list ? i % entries : random.integer(0, entries - 1)) * (entry + gap));
      }
      row_offsets.push_back(static_cast<int64_t>(slots.size()));
    }
    chunk = random.one_of({1, 16, 50, 64, 200});
    // So many blocks tell all there is.
    chunk = std::max<int64_t>(chunk, static_cast<int64_t>(slots.size()) * kv_heads / 12);
  }

  Result on_cpu() const {
    Result result = empty();
    const std::vector<float> wide(q.begin(), q.end());
    cpu::SparseAttention<T, float> call;
    describe(call, result);
    call.q = wide.data();
    cpu::sparse_attention(call);
    return result;
  }

  Result emulated() const {
    Result result = empty();
    SparseAttention call{};
    describe(call, result);
    call.q = q.data();
    call.pool_size = static_cast<int64_t>(pool.size());
    call.element = std::is_same_v<T, fp16>   ? Element::kFloat16
                   : std::is_same_v<T, bf16> ? Element::kBFloat16
                                             : Element::kFloat32;
    call.total = static_cast<int64_t>(slots.size());
    call.chunk = chunk;
    std::vector<float> scratch(scratch_size(call), NAN);
    call.scratch = scratch.data();
    EXPECT_EQ(sparse_attention(call, nullptr), cudaSuccess);
    return result;
  }

  std::string text() const {
    std::string result = "dim " + std::to_string(dim) + ", " + std::to_string(query_heads) + "/" +
                         std::to_string(kv_heads) + " heads, chunk " + std::to_string(chunk) +
                         ", softcap " + std::to_string(softcap) + ", rows at";
    for (const int64_t offset : row_offsets) result += " " + std::to_string(offset);
    return result;
  }

 private:
  Result empty() const {
    return {std::vector<float>(rows * query_heads * dim, NAN),
            std::vector<float>(rows * query_heads, NAN)};
  }
  // What calls of the CPU and of the kernels have in common.
  template <typename Call>
  void describe(Call& call, Result& result) const {
    call.pool = pool.data();
    call.slots = slots.data();
    call.row_offsets = row_offsets.data();
    call.rows = rows;
    call.query_heads = query_heads;
    call.kv_heads = kv_heads;
    call.dim = dim;
    call.scale = scale;
    call.sinks = sinks.empty() ? nullptr : sinks.data();
    call.softcap = softcap;
    call.out = result.out.data();
    call.lse = result.lse.data();
  }
};

double difference_of(const Result& actual, const Result& expected) {
  return std::max(difference(actual.out, expected.out), difference(actual.lse, expected.lse));
}

template <typename T>
class CudaAttention : public testing::Test {};
using Elements = testing::Types<float, fp16, bf16>;
TYPED_TEST_SUITE(CudaAttention, Elements);

TYPED_TEST(CudaAttention, EqualsTheCpu) {
  const double tolerance = std::is_same_v<TypeParam, float> ? 1e-5 : 2e-2;
  double worst = 0;
  for (unsigned seed = 0; seed < kCases; ++seed) {
    const Case<TypeParam> own(seed);
    const Result result = own.emulated();
    const double off = difference_of(result, own.on_cpu());
    ASSERT_LE(off, tolerance) << "case " << seed << ": " << own.text();
    worst = std::max(worst, off);
    if (seed % 8 != 0) continue;
    // Another order of threads and blocks gives the same bits.
    emulation::set_seed(kCases + seed + 1);
    ASSERT_EQ(own.emulated().out, result.out) << "case " << seed;
  }
  this->RecordProperty("worst", std::to_string(worst));
  std::printf("largest difference %.2e\n", worst);
}

TYPED_TEST(CudaAttention, AnotherEntryShows) {
  int shown = 0;
  for (unsigned seed = 0; seed < 20; ++seed) {
    Case<TypeParam> own(seed);
    const Result expected = own.on_cpu();
    if (!own.slots.empty()) own.slots.back() = 0;
    shown += difference_of(own.emulated(), expected) > 2e-2 ? 1 : 0;
  }
  EXPECT_GT(shown, 5);  // in the others it counts for little, or not at all
}

TYPED_TEST(CudaAttention, ASlotOutsideIsNotReadAndMakesItsRowNan) {
  const Case<TypeParam> right(3);
  const int64_t entry = 2 * right.kv_heads * right.dim;
  const int64_t last = static_cast<int64_t>(right.pool.size()) - entry;
  int64_t row = 0;
  while (right.row_offsets[row] == right.row_offsets[row + 1]) ++row;
  for (const int64_t wrong : {last + 16, int64_t{-16}, int64_t{1}, int64_t{1} << 60}) {
    Case<TypeParam> own = right;
    own.slots[right.row_offsets[row + 1] - 1] = wrong;
    const Result result = own.emulated(), expected = right.emulated();
    for (int64_t r = 0; r < own.rows; ++r) {
      const int64_t size = own.query_heads * own.dim;
      for (int64_t i = r * size; i < (r + 1) * size; ++i) {
        if (r == row) {
          ASSERT_TRUE(std::isnan(result.out[i])) << wrong;
        } else {
          ASSERT_EQ(result.out[i], expected.out[i]) << wrong;
        }
      }
    }
    EXPECT_TRUE(std::isnan(result.lse[row * own.query_heads]));
  }
}

TEST(CudaAttentionLists, OffsetsOfNoMeaningReadNothingOutside) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Case<float> own(seed);
    Generator random(seed);
    const int64_t total = static_cast<int64_t>(own.slots.size());
    for (int64_t& offset : own.row_offsets) offset = random.integer(-total, total + 2);
    own.emulated();
  }
}

TEST(CudaAttentionChunks, FitTheDevice) {
  SparseAttention call{};
  call.query_heads = 64;
  call.kv_heads = 8;
  call.dim = 128;
  call.rows = 1;
  for (const int64_t total : {0, 1, 1000, 13107, 1 << 20}) {
    call.total = total;
    call.chunk = suitable_chunk(call, 132);
    EXPECT_EQ(call.chunk % 64, 0);
    EXPECT_GE(call.chunk, 128);
    EXPECT_LE((total + call.chunk - 1) / call.chunk * call.kv_heads, 3 * 132 + call.kv_heads);
  }
}

TEST(CudaMergeAttention, EqualsTheCpu) {
  for (unsigned seed = 0; seed < kCases; ++seed) {
    Generator random(seed);
    const int64_t rows = random.integer(0, 11), dim = random.one_of({1, 3, 31, 64, 65, 128, 256});
    std::array<std::vector<float>, 2> out, lse;
    for (int side = 0; side < 2; ++side) {
      out[side] = random.normal(rows * dim);
      lse[side] = random.normal(rows);
      for (float& value : lse[side]) {
        value = random.chance(0.3) ? -kInfinity : value * random.one_of<float>({1.0f, 100.0f});
      }
    }
    Result expected{std::vector<float>(rows * dim), std::vector<float>(rows)}, result = expected;
    cpu::merge_attention(out[0].data(), lse[0].data(), out[1].data(), lse[1].data(), rows, dim,
                         expected.out.data(), expected.lse.data());
    EXPECT_EQ(merge_attention(out[0].data(), lse[0].data(), out[1].data(), lse[1].data(), rows, dim,
                              result.out.data(), result.lse.data(), nullptr),
              cudaSuccess);
    ASSERT_LE(difference_of(result, expected), 1e-5) << "case " << seed;
  }
}

}  // namespace
}  // namespace swarm_kv::cuda
