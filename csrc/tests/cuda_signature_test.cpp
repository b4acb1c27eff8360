// Activation signatures on the emulated GPU are those of the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <variant>

#include "core/signature.h"
#include "cuda_rig.h"
#include "ops/cuda/signature.h"

namespace swarm_kv::cuda {
namespace {

constexpr double kTolerance = 1e-5;

struct Case {
  int64_t heads_q, heads_kv, queries, entries, dim, row_stride;
  std::vector<float> q;
  std::variant<std::vector<float>, std::vector<fp16>, std::vector<bf16>> k;
  std::vector<int64_t> position;
  std::vector<float> lse;  // empty: not given
  SignatureOptions options;

  int64_t words() const { return (queries + 63) / 64; }
  const float* given_lse() const { return lse.empty() ? nullptr : lse.data(); }
  float key(int64_t head, int64_t entry, int64_t d) const {
    return std::visit(
        [&](const auto& keys) -> float { return keys[(head * entries + entry) * row_stride + d]; },
        k);
  }
};

Case random_case(Generator& random, int64_t queries) {
  Case c;
  c.heads_kv = random.integer(1, 2);
  c.heads_q = c.heads_kv * random.one_of({1, 1, 2});
  c.queries = queries;
  c.entries = random.one_of({1, 2, 15, 40, 63, 64, 65, 130});
  c.dim = random.one_of({1, 2, 3, 16, 31, 33});
  c.row_stride = c.dim + random.integer(0, 3);
  c.q = random.normal(c.heads_q * c.queries * c.dim);
  if (random.chance(0.1)) c.q.assign(c.q.size(), 0.0f);  // all scores are equal
  std::vector<float> keys = random.normal(c.heads_kv * c.entries * c.row_stride);
  if (random.chance(0.5)) {  // ties: neighbours with the same key
    for (int64_t i = 0; i + 1 < c.heads_kv * c.entries; i += 2) {
      std::copy_n(keys.begin() + i * c.row_stride, c.row_stride,
                  keys.begin() + (i + 1) * c.row_stride);
    }
  }
  if (random.chance(0.2)) {
    c.k = std::vector<fp16>(keys.begin(), keys.end());
  } else if (random.chance(0.2)) {
    c.k = std::vector<bf16>(keys.begin(), keys.end());
  } else {
    c.k = keys;
  }
  const int64_t latest = c.entries + 20;
  for (int64_t t = 0; t < c.queries; ++t) c.position.push_back(random.integer(0, latest));
  if (random.chance(0.5)) std::fill(c.position.begin(), c.position.end(), latest);
  if (random.chance(0.4)) {
    c.lse = random.normal(c.heads_q * c.queries);
    for (float& x : c.lse) x += 3;
  }
  c.options.sparsity = random.one_of({1, 5, 20, 60, 100}) / 100.0;
  c.options.window = random.one_of({0, 1, 10, 40});
  c.options.sinks = random.one_of({0, 0, 3});
  c.options.scale = 1.5 / std::sqrt(static_cast<double>(c.dim));
  c.options.context = random.chance(0.2) ? random.integer(1, 300) : 0;
  c.options.heads =
      static_cast<HeadAggregation>(random.integer(0, static_cast<int>(HeadAggregation::kUnion)));
  return c;
}

SignatureQueries queries_of(const Case& c) {
  return {c.q.data(), c.heads_q, c.queries, c.dim, c.position.data(), c.given_lse()};
}

SignatureKeys keys_of(const Case& c) {
  constexpr Element kElements[] = {Element::kFloat32, Element::kFloat16, Element::kBFloat16};
  const void* data =
      std::visit([](const auto& keys) { return static_cast<const void*>(keys.data()); }, c.k);
  return {{data, kElements[c.k.index()]},
          c.heads_kv,
          c.entries,
          c.entries * c.row_stride,
          c.row_stride};
}

std::vector<int64_t> gpu_bits(const Case& c) {
  std::vector<int64_t> bits(c.entries * c.words(), 0x55);
  const Scratch scratch(signature_scratch(queries_of(c), keys_of(c)));
  EXPECT_EQ(activation_signatures(queries_of(c), keys_of(c), c.options, bits.data(), scratch.get(),
                                  nullptr),
            cudaSuccess);
  return bits;
}

std::vector<int64_t> cpu_bits(const Case& c) {
  std::vector<int64_t> bits(c.entries * c.words());
  const HeadRows q{c.q.data(), c.heads_q, c.queries, c.dim, c.queries * c.dim, c.dim};
  HeadRows k{{}, c.heads_kv, c.entries, c.dim, c.entries * c.row_stride, c.row_stride};
  std::visit([&](const auto& keys) { k.data = keys.data(); }, c.k);
  swarm_kv::activation_signatures(q, k, c.position.data(), c.given_lse(), c.options, bits.data());
  return bits;
}

bool is_set(const Case& c, const std::vector<int64_t>& bits, int64_t entry, int64_t t) {
  return bits[entry * c.words() + t / 64] >> (t % 64) & 1;
}

// Probabilities of one query by one head, in double.
std::vector<double> probabilities(const Case& c, int64_t head, int64_t t) {
  const int64_t kv = head / (c.heads_q / c.heads_kv);
  std::vector<double> result(c.entries);
  double sum = 0;
  for (int64_t j = 0; j < c.entries; ++j) {
    double score = 0;
    for (int64_t d = 0; d < c.dim; ++d) {
      score += static_cast<double>(c.q[(head * c.queries + t) * c.dim + d]) * c.key(kv, j, d);
    }
    result[j] = score * c.options.scale;
    if (j <= c.position[t]) sum += std::exp(result[j]);
  }
  const double lse = c.lse.empty() ? std::log(sum) : c.lse[head * c.queries + t];
  for (double& x : result) x = std::min(1.0, std::exp(x - lse));
  return result;
}

// Whether an entry's rank with query t is a matter of rounding: by one of the rankings its
// probability is that of the last entry that is taken.
bool is_close_call(const Case& c, int64_t entry, int64_t t) {
  std::vector<std::vector<double>> rankings;
  for (int64_t head = 0; head < c.heads_q; ++head) {
    const std::vector<double> own = probabilities(c, head, t);
    if (head == 0 || c.options.heads == HeadAggregation::kUnion) {
      rankings.push_back(own);
      continue;
    }
    for (int64_t j = 0; j < c.entries; ++j) {
      double& all = rankings[0][j];
      all = c.options.heads == HeadAggregation::kMax ? std::max(all, own[j]) : all + own[j];
    }
  }
  const int64_t end = std::min(c.position[t] - c.options.window + 1, c.entries);
  const int64_t budget = activation_budget(c.options, c.entries);
  for (const std::vector<double>& ranking : rankings) {
    std::vector<double> eligible(ranking.begin() + c.options.sinks, ranking.begin() + end);
    if (std::ssize(eligible) <= budget) continue;
    std::nth_element(eligible.begin(), eligible.begin() + budget - 1, eligible.end(),
                     std::greater<>());
    if (std::abs(ranking[entry] / eligible[budget - 1] - 1) < kTolerance) return true;
  }
  return false;
}

// How many queries differ; fails where that is more than a matter of rounding.
int compare(const Case& c, const std::vector<int64_t>& got, const std::vector<int64_t>& wanted) {
  int different = 0;
  for (int64_t t = 0; t < c.words() * 64; ++t) {
    int64_t more = 0;
    bool same = true;
    for (int64_t j = 0; j < c.entries; ++j) {
      const bool here = is_set(c, got, j, t), there = is_set(c, wanted, j, t);
      more += static_cast<int>(here) - static_cast<int>(there);
      if (here == there) continue;
      same = false;
      EXPECT_TRUE(t < c.queries && is_close_call(c, j, t)) << "entry " << j << ", query " << t;
      if (t >= c.queries) return different;
    }
    if (c.options.heads != HeadAggregation::kUnion) {
      EXPECT_EQ(more, 0) << "query " << t;
    }
    different += same ? 0 : 1;
  }
  return different;
}

TEST(CudaSignature, BitsAreThoseOfTheCpu) {
  int64_t queries = 0, different = 0;
  for (unsigned seed = 0; seed < kCases; ++seed) {
    Generator random(seed);
    const Case c = random_case(
        random, seed % 20 == 0 ? random.one_of({63, 64, 65, 130}) : random.integer(1, 4));
    queries += c.queries;
    different += compare(c, gpu_bits(c), cpu_bits(c));
    if (HasFailure()) {
      FAIL() << "seed " << seed << ": heads " << c.heads_q << '/' << c.heads_kv << ", queries "
             << c.queries << ", entries " << c.entries << ", dim " << c.dim << ", aggregation "
             << static_cast<int>(c.options.heads) << ", lse " << c.lse.size();
    }
  }
  EXPECT_LE(different, queries / 50);
}

TEST(CudaSignature, AnotherSparsityShows) {
  Generator random(5);
  Case c = random_case(random, 8);
  while (c.entries != 15) c = random_case(random, 8);
  c.options.window = c.options.sinks = c.options.context = 0;
  c.options.sparsity = 0.4;
  std::fill(c.position.begin(), c.position.end(), 15);
  const std::vector<int64_t> wanted = cpu_bits(c);
  EXPECT_EQ(gpu_bits(c), wanted);
  c.options.sparsity = 0.47;
  EXPECT_NE(gpu_bits(c), wanted);
}

TEST(CudaSignature, BitsDoNotDependOnTheOrderOfThreads) {
  Generator random(11);
  const Case c = random_case(random, 5);
  const std::vector<int64_t> wanted = gpu_bits(c);
  for (uint64_t seed = 0; seed < 6; ++seed) {
    emulation::set_seed(seed);
    EXPECT_EQ(gpu_bits(c), wanted);
  }
}

TEST(CudaSignature, NothingToDoIsNoLaunch) {
  Generator random(1);
  Case c = random_case(random, 0);
  EXPECT_TRUE(gpu_bits(c).empty());
  SignatureKeys none = keys_of(c);
  none.rows = 0;
  EXPECT_EQ(activation_signatures(queries_of(c), none, c.options, nullptr, nullptr, nullptr),
            cudaSuccess);
}

TEST(CudaSignature, ExtremesAreFound) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Generator random(seed);
    Case c = random_case(random, random.one_of({0, 1, 70}));
    SignatureExtremes extremes;
    ASSERT_EQ(signature_extremes(queries_of(c), keys_of(c), &extremes, nullptr), cudaSuccess);
    float k = 0;
    for (int64_t i = 0; i < c.heads_kv * c.entries * c.dim; ++i) {
      k = std::max(k, std::abs(c.key(i / c.dim / c.entries, i / c.dim % c.entries, i % c.dim)));
    }
    EXPECT_EQ(extremes.q, largest_magnitude(c.q.data(), std::ssize(c.q)));
    EXPECT_EQ(extremes.k, k);
    EXPECT_EQ(extremes.lse, largest_magnitude(c.lse.data(), std::ssize(c.lse)));
    EXPECT_EQ(extremes.positions,
              c.queries == 0 ? 0 : *std::min_element(c.position.begin(), c.position.end()));
    if (c.queries == 0) continue;
    c.position[random.integer(0, c.queries - 1)] = -7;
    c.q[random.integer(0, std::ssize(c.q) - 1)] = NAN;
    ASSERT_EQ(signature_extremes(queries_of(c), keys_of(c), &extremes, nullptr), cudaSuccess);
    EXPECT_EQ(extremes.positions, -1);
    EXPECT_TRUE(std::isnan(extremes.q));
  }
}

}  // namespace
}  // namespace swarm_kv::cuda
