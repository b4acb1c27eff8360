#include "core/signature.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/parallel.h"
#include "io/error.h"

namespace swarm_kv {
namespace {

struct Case {
  int64_t heads_q = 4;
  int64_t queries = 20;
  int64_t heads_kv = 2;
  int64_t entries = 100;
  int64_t dim = 8;
  std::vector<float> q = {};
  std::vector<float> k = {};
  std::vector<int64_t> position = {};
  std::vector<float> lse = {};  // empty: not given
  SignatureOptions options = {};

  int64_t words() const { return (queries + 63) / 64; }
};

// Queries are the last tokens of the context, as at the end of a prefill.
Case fill(Case c, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  c.q.resize(c.heads_q * c.queries * c.dim);
  c.k.resize(c.heads_kv * c.entries * c.dim);
  for (float& x : c.q) x = normal(random);
  for (float& x : c.k) x = normal(random);
  c.position.resize(c.queries);
  for (int64_t t = 0; t < c.queries; ++t) {
    c.position[t] = std::max<int64_t>(0, c.entries - c.queries + t);
  }
  c.options.scale = 1.0 / std::sqrt(static_cast<double>(c.dim));
  return c;
}

template <typename T>
HeadRows contiguous(const std::vector<T>& values, int64_t heads, int64_t rows, int64_t dim) {
  return {values.data(), heads, rows, dim, rows * dim, dim};
}

void run(const Case& c, std::vector<int64_t>& bits) {
  activation_signatures(contiguous(c.q, c.heads_q, c.queries, c.dim),
                        contiguous(c.k, c.heads_kv, c.entries, c.dim), c.position.data(),
                        c.lse.empty() ? nullptr : c.lse.data(), c.options, bits.data());
}

std::vector<int64_t> signatures(const Case& c) {
  std::vector<int64_t> bits(c.entries * c.words(), -1);  // what was there must not survive
  run(c, bits);
  return bits;
}

bool is_set(const Case& c, const std::vector<int64_t>& bits, int64_t entry, int64_t t) {
  return (static_cast<uint64_t>(bits[entry * c.words() + t / 64]) >> (t % 64)) & 1;
}

// Scaled scores of query t in head h for the keys that it sees, in double, from the definition.
std::vector<double> reference_scores(const Case& c, int64_t h, int64_t kv_head, int64_t t) {
  std::vector<double> scores(std::min(c.position[t], c.entries - 1) + 1);
  for (int64_t j = 0; j < std::ssize(scores); ++j) {
    double dot = 0.0;
    for (int64_t d = 0; d < c.dim; ++d) {
      dot += static_cast<double>(c.q[(h * c.queries + t) * c.dim + d]) *
             c.k[(kv_head * c.entries + j) * c.dim + d];
    }
    scores[j] = dot * c.options.scale;
  }
  return scores;
}

double log_sum_exp(const std::vector<double>& scores) {
  const double maximum = *std::max_element(scores.begin(), scores.end());
  double sum = 0.0;
  for (const double s : scores) sum += std::exp(s - maximum);
  return maximum + std::log(sum);
}

// The same case with the log-sum-exp that attention would have computed.
Case with_lse(Case c) {
  c.lse.resize(c.heads_q * c.queries);
  for (int64_t h = 0; h < c.heads_q; ++h) {
    for (int64_t t = 0; t < c.queries; ++t) {
      c.lse[h * c.queries + t] =
          static_cast<float>(log_sum_exp(reference_scores(c, h, h / (c.heads_q / c.heads_kv), t)));
    }
  }
  return c;
}

// What query t ranks entries by: one list, or for kUnion one per head. `kv_head` maps query heads
// to key heads.
template <typename KvHead>
std::vector<std::vector<double>> reference_rankings(const Case& c, int64_t t, KvHead kv_head) {
  std::vector<std::vector<double>> rankings;
  for (int64_t h = 0; h < c.heads_q; ++h) {
    const std::vector<double> scores = reference_scores(c, h, kv_head(h), t);
    const double lse = log_sum_exp(scores);
    if (h == 0 || c.options.heads == HeadAggregation::kUnion) {
      rankings.emplace_back(c.entries, 0.0);
    }
    for (int64_t j = 0; j < std::ssize(scores); ++j) {
      const double probability = std::exp(scores[j] - lse);
      double& value = rankings.back()[j];
      value = c.options.heads == HeadAggregation::kMax ? std::max(value, probability)
                                                       : value + probability;
    }
  }
  return rankings;
}

// What differs between `bits` and the definition, or "". Scores closer than float32 can tell apart
// may swap.
template <typename KvHead>
std::string mismatch(const Case& c, const std::vector<int64_t>& bits, KvHead kv_head) {
  constexpr double kTolerance = 1e-5;
  const int64_t context = c.options.context ? c.options.context : c.entries;
  const int64_t budget = std::max<int64_t>(1, std::llround(c.options.sparsity * context));
  for (int64_t t = 0; t < c.words() * 64; ++t) {
    const std::string where = " query " + std::to_string(t);
    std::vector<int64_t> eligible;
    std::vector<std::vector<double>> rankings;
    if (t < c.queries) {
      rankings = reference_rankings(c, t, kv_head);
      for (int64_t j = c.options.sinks; j < c.entries; ++j) {
        if (j <= c.position[t] - c.options.window) eligible.push_back(j);
      }
    }
    const int64_t expected = std::min<int64_t>(budget, static_cast<int64_t>(eligible.size()));
    std::vector<double> thresholds;
    for (const std::vector<double>& scores : rankings) {
      std::vector<double> ranked;
      for (const int64_t j : eligible) ranked.push_back(scores[j]);
      std::sort(ranked.rbegin(), ranked.rend());
      if (expected > 0) thresholds.push_back(ranked[expected - 1]);
    }
    int64_t count = 0;
    for (int64_t j = 0; j < c.entries; ++j) count += is_set(c, bits, j, t);
    if (count < expected || count > expected * std::max<int64_t>(1, std::ssize(thresholds))) {
      return std::to_string(count) + " activated, not " + std::to_string(expected) + where;
    }
    if (expected == 0) continue;
    int64_t inside = 0;
    for (const int64_t j : eligible) {
      bool must = false;
      bool may = false;
      for (size_t i = 0; i < thresholds.size(); ++i) {
        must |= rankings[i][j] > thresholds[i] * (1 + kTolerance);
        may |= rankings[i][j] >= thresholds[i] * (1 - kTolerance);
      }
      const bool set = is_set(c, bits, j, t);
      inside += set;
      if (set ? !may : must) return "entry " + std::to_string(j) + where;
    }
    if (inside != count) return "an entry that is not eligible" + where;
  }
  return "";
}

std::string mismatch(const Case& c, const std::vector<int64_t>& bits) {
  return mismatch(c, bits, [&](int64_t h) { return h / (c.heads_q / c.heads_kv); });
}

SignatureOptions options(double sparsity, int64_t window, int64_t sinks, int64_t context = 0) {
  SignatureOptions result;
  result.sparsity = sparsity;
  result.window = window;
  result.sinks = sinks;
  result.context = context;
  return result;
}

constexpr HeadAggregation kAggregations[] = {HeadAggregation::kMean, HeadAggregation::kMax,
                                             HeadAggregation::kUnion};

TEST(Signature, MatchesTheDefinition) {
  // Sizes on both sides of every block: 12 keys, 96 keys, 16 queries, 64 queries.
  const Case cases[] = {
      {.heads_q = 1, .queries = 1, .heads_kv = 1, .entries = 10, .dim = 1},
      {.heads_q = 1, .queries = 1, .heads_kv = 1, .entries = 97, .dim = 64},
      {.heads_q = 3, .queries = 15, .heads_kv = 1, .entries = 96, .dim = 5},
      {.heads_q = 9, .queries = 33, .heads_kv = 3, .entries = 191, .dim = 16},
      {.heads_q = 4, .queries = 64, .heads_kv = 4, .entries = 193, .dim = 7},
      {.heads_q = 8, .queries = 65, .heads_kv = 2, .entries = 289, .dim = 32},
      {.heads_q = 2, .queries = 130, .heads_kv = 2, .entries = 500, .dim = 12},
  };
  const SignatureOptions variants[] = {options(0.1, 1, 0), options(0.05, 8, 4), options(0.3, 0, 1),
                                       options(1.0, 5, 2), options(0.01, 3, 0, 2000)};
  uint32_t seed = 0;
  for (Case c : cases) {
    for (const SignatureOptions& variant : variants) {
      c.options = variant;
      c = fill(c, ++seed);
      c.options.heads = kAggregations[seed % 3];
      ASSERT_EQ(mismatch(c, signatures(c)), "") << seed;
      ASSERT_EQ(mismatch(c, signatures(with_lse(c))), "") << seed << " with lse";
    }
  }
}

TEST(Signature, ReferenceNoticesMistakes) {
  Case c;
  c.options = options(0.1, 8, 4);
  c = fill(c, 1);
  const std::vector<int64_t> good = signatures(c);
  ASSERT_EQ(mismatch(c, good), "");
  // The other mapping of grouped heads.
  EXPECT_NE(mismatch(c, good, [&](int64_t h) { return h % c.heads_kv; }), "");
  for (const SignatureOptions& other :
       {options(0.11, 8, 4), options(0.1, 30, 4), options(0.1, 8, 30)}) {
    Case changed = c;
    const double scale = c.options.scale;
    changed.options = other;
    changed.options.scale = scale;
    EXPECT_NE(mismatch(changed, good), "");
  }
  Case shifted = c;
  for (int64_t& position : shifted.position) position -= 20;
  EXPECT_NE(mismatch(shifted, good), "");
  Case scaled = c;
  scaled.options.scale *= 4;
  EXPECT_NE(mismatch(scaled, good), "");
  for (const HeadAggregation heads : {HeadAggregation::kMax, HeadAggregation::kUnion}) {
    Case other = c;
    other.options.heads = heads;
    EXPECT_NE(mismatch(other, good), "");
  }
  Case given = with_lse(c);  // one head's mass a thousand times too small
  for (int64_t t = 0; t < c.queries; ++t) given.lse[t] += 7.0f;
  EXPECT_NE(mismatch(c, signatures(given)), "");
  std::vector<int64_t> swapped = good;
  std::swap(swapped[10], swapped[20]);
  EXPECT_NE(mismatch(c, swapped), "");
}

TEST(Signature, QueriesMayComeInAnyOrderAndAfterTheEntries) {
  Case c{.queries = 70, .entries = 300};
  c.options = options(0.1, 16, 2);
  c = fill(c, 3);
  std::mt19937 random(4);
  for (int64_t& position : c.position) position = static_cast<int64_t>(random() % 600);
  c.position[0] = 0;
  c.position[1] = std::numeric_limits<int64_t>::max();
  ASSERT_EQ(mismatch(c, signatures(c)), "");
}

// The way that threads share the work changes with the number of keys.
TEST(Signature, ManyKeys) {
  Case c{.heads_q = 2, .queries = 17, .heads_kv = 1, .entries = 40000, .dim = 2};
  c.options = options(0.1, 50, 2);
  c = fill(c, 20);
  EXPECT_EQ(mismatch(c, signatures(c)), "");
  c.lse = with_lse(c).lse;
  EXPECT_EQ(mismatch(c, signatures(c)), "");
  c.position[3] = 200;
  EXPECT_NE(mismatch(c, signatures(with_lse(fill(c, 20)))), "");
}

TEST(Signature, AggregationsOfHeads) {
  // Head 0 cares for key 0 alone, head 1 for keys 1 and 2 equally, and both a little for key 3.
  Case c{.heads_q = 2, .queries = 1, .heads_kv = 1, .entries = 4, .dim = 2};
  c = fill(c, 1);
  c.options = options(0.25, 0, 0);
  c.q = {1, 0, 0, 1};
  c.k = {1, -9, -9, 2, -9, 2, 0.9f, 1.9f};
  EXPECT_EQ(signatures(c), (std::vector<int64_t>{0, 0, 0, 1}));
  c.options.heads = HeadAggregation::kMax;
  EXPECT_EQ(signatures(c), (std::vector<int64_t>{1, 0, 0, 0}));
  c.options.heads = HeadAggregation::kUnion;
  EXPECT_EQ(signatures(c), (std::vector<int64_t>{1, 1, 0, 0}));
}

TEST(Signature, NamesOfAggregations) {
  EXPECT_EQ(head_aggregation("mean"), HeadAggregation::kMean);
  EXPECT_EQ(head_aggregation("max"), HeadAggregation::kMax);
  EXPECT_EQ(head_aggregation("union"), HeadAggregation::kUnion);
  try {
    head_aggregation("median");
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kArgument);
    EXPECT_NE(std::string(error.what()).find("\"median\"; choose one of: mean, max, union"),
              std::string::npos)
        << error.what();
  }
}

// A given log-sum-exp stands for keys that k does not hold: here, another half of the context.
TEST(Signature, GivenMassMayLieOutsideTheKeys) {
  Case c{.heads_q = 2, .queries = 20, .heads_kv = 1, .entries = 60};
  c.options = options(0.1, 0, 0);
  c = fill(c, 21);
  std::fill(c.position.begin(), c.position.end(), 1000);
  const std::vector<int64_t> alone = signatures(c);
  c = with_lse(c);
  EXPECT_EQ(signatures(c), alone);
  for (int64_t t = 0; t < c.queries; ++t) c.lse[t] += 7.0f;  // head 0 looks elsewhere
  Case head1 = c;
  head1.heads_q = 1;
  head1.q.erase(head1.q.begin(), head1.q.begin() + c.queries * c.dim);
  head1.lse.clear();
  EXPECT_EQ(signatures(c), signatures(head1));
  EXPECT_NE(signatures(c), alone);
}

// Probabilities stay within 1 when the given mass is too small, which rounding may cause.
TEST(Signature, ProbabilitiesDoNotExceedOne) {
  Case c{.heads_q = 1, .queries = 1, .heads_kv = 1, .entries = 4, .dim = 1};
  c = fill(c, 1);
  c.options = options(0.25, 0, 0);
  c.q = {1};
  c.k = {1, 200, 300, 2};
  c.lse = {150};
  EXPECT_EQ(signatures(c), (std::vector<int64_t>{0, 1, 0, 0}));  // a tie at 1
  c.lse = {250};
  EXPECT_EQ(signatures(c), (std::vector<int64_t>{0, 0, 1, 0}));
}

template <typename T>
void expect_same_in(const Case& c) {
  // [rows][heads][dim + 3]: as a cache may hold them.
  const auto scattered = [&](std::vector<float>& values, int64_t heads, int64_t rows) {
    std::vector<T> result(rows * heads * (c.dim + 3));
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t d = 0; d < c.dim; ++d) {
          float& value = values[(h * rows + r) * c.dim + d];
          T& stored = result[(r * heads + h) * (c.dim + 3) + d];
          stored = T(value);
          value = static_cast<float>(stored);
        }
      }
    }
    return result;
  };
  const auto view = [&](const std::vector<T>& values, int64_t heads, int64_t rows) {
    return HeadRows{values.data(), heads, rows, c.dim, c.dim + 3, heads * (c.dim + 3)};
  };
  Case rounded = c;
  const std::vector<T> q = scattered(rounded.q, c.heads_q, c.queries);
  const std::vector<T> k = scattered(rounded.k, c.heads_kv, c.entries);
  std::vector<int64_t> bits(c.entries * c.words(), -1);
  const HeadRows keys = view(k, c.heads_kv, c.entries);
  activation_signatures(view(q, c.heads_q, c.queries), keys, c.position.data(), nullptr, c.options,
                        bits.data());
  EXPECT_EQ(bits, signatures(rounded));
  HeadRows shifted = keys;
  shifted.rows -= 1;
  shifted.data = k.data() + keys.row_stride;
  std::vector<int64_t> other((c.entries - 1) * c.words(), -1);
  activation_signatures(view(q, c.heads_q, c.queries), shifted, c.position.data(), nullptr,
                        c.options, other.data());
  other.resize(bits.size());
  EXPECT_NE(bits, other);
}

TEST(Signature, AnyTypeAndStrides) {
  Case c{.heads_q = 4, .queries = 37, .heads_kv = 2, .entries = 211, .dim = 9};
  c.options = options(0.1, 8, 1);
  c = fill(c, 22);
  expect_same_in<float>(c);
  expect_same_in<double>(c);
  expect_same_in<fp16>(c);
  expect_same_in<bf16>(c);
}

TEST(Signature, ResidentKeysTakeTheirMass) {
  // Head 0 attends almost only to a sink; without the sink's mass its 2nd choice would win over
  // head 1's choice.
  Case c{.heads_q = 2, .queries = 1, .heads_kv = 1, .entries = 4, .dim = 2};
  c.options = options(0.25, 1, 1);
  c = fill(c, 1);
  c.options.scale = 1.0;
  c.q = {1, 0, 0, 1};
  c.k = {10, 0, 5, 0, 0, 2, 0, 0};
  EXPECT_EQ(signatures(c), (std::vector<int64_t>{0, 0, 1, 0}));
  c.k[0] = 0;  // negative control: no mass on the sink
  EXPECT_EQ(signatures(c), (std::vector<int64_t>{0, 1, 0, 0}));
}

TEST(Signature, TiesGoToTheLowerIndex) {
  Case c{.queries = 40, .entries = 250};
  c.options = options(0.1, 10, 3);
  c = fill(c, 5);
  std::fill(c.k.begin(), c.k.end(), 0.5f);
  const std::vector<int64_t> bits = signatures(c);
  for (int64_t j = 0; j < c.entries; ++j) {
    const bool first = j >= 3 && j < 28;
    EXPECT_EQ(bits[j], first ? (int64_t{1} << 40) - 1 : 0) << j;
  }
}

TEST(Signature, KeysWithoutProbabilityAreNotActivated) {
  Case c{.heads_q = 1, .queries = 1, .heads_kv = 1, .entries = 200, .dim = 1};
  c.options = options(0.5, 1, 0);
  c = fill(c, 6);
  c.options.scale = 1.0;
  c.q[0] = 1.0f;
  std::fill(c.k.begin(), c.k.end(), -1000.0f);
  c.k[17] = 0.0f;
  c.k[150] = -3.0f;
  const std::vector<int64_t> bits = signatures(c);
  for (int64_t j = 0; j < c.entries; ++j) EXPECT_EQ(bits[j], j == 17 || j == 150) << j;
}

TEST(Signature, ContextInsideTheWindowActivatesNothing) {
  Case c{.queries = 30, .entries = 30};
  c.options = options(0.1, 256, 0);
  c = fill(c, 7);
  EXPECT_EQ(signatures(c), std::vector<int64_t>(30, 0));
  c.options.window = 0;
  EXPECT_NE(signatures(c), std::vector<int64_t>(30, 0));
  c.options.sinks = 1000;
  EXPECT_EQ(signatures(c), std::vector<int64_t>(30, 0));
}

TEST(Signature, EmptyInputs) {
  Case c{.queries = 0};
  c = fill(c, 8);
  EXPECT_TRUE(signatures(c).empty());
  c = fill(Case{.entries = 0}, 8);
  EXPECT_TRUE(signatures(c).empty());
}

TEST(Signature, ThreadCountDoesNotMatter) {
  Case few{.heads_q = 6, .queries = 100, .heads_kv = 2, .entries = 700, .dim = 16};
  Case many{.heads_q = 2, .queries = 17, .heads_kv = 1, .entries = 33000, .dim = 2};
  const int threads = num_threads();
  for (Case wanted : {few, many}) {
    wanted.options = options(0.1, 32, 4);
    wanted = fill(wanted, 9);
    std::vector<int64_t> expected;
    for (const HeadAggregation heads : kAggregations) {
      wanted.options.heads = heads;
      set_num_threads(1);
      expected = signatures(wanted);
      set_num_threads(5);
      EXPECT_EQ(signatures(wanted), expected);
    }
    EXPECT_NE(signatures(fill(wanted, 10)), expected);
  }
  set_num_threads(threads);
}

// `part` must be in the message, and `bits` untouched.
void expect_rejected(const Case& c, const std::string& part) {
  std::vector<int64_t> bits(c.entries * c.words(), 77);
  try {
    run(c, bits);
    ADD_FAILURE() << "accepted: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kArgument);
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
  EXPECT_EQ(bits, std::vector<int64_t>(bits.size(), 77)) << part;
}

TEST(Signature, RejectsValuesThatAreNotFinite) {
  const Case good = fill(Case{}, 11);
  signatures(good);
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    for (const size_t i : {size_t{0}, size_t{333}, good.q.size() - 1}) {
      Case c = good;
      c.q[i] = bad;
      expect_rejected(c, "q holds NaN");
      c = good;
      c.k[i] = bad;
      expect_rejected(c, "k holds NaN");
    }
    Case c = with_lse(good);
    c.lse[20] = bad;
    expect_rejected(c, "lse holds NaN");
  }
}

TEST(Signature, RejectsScoresThatOverflow) {
  for (const float sign : {1.0f, -1.0f}) {
    Case c = fill(Case{}, 12);
    c.options.window = 1;
    for (float& x : c.q) x = 1e30f;
    for (float& x : c.k) x = sign * 1e30f;
    expect_rejected(c, "scores may overflow");
    for (float& x : c.k) x = sign * 1e5f;  // large, but float32 holds what comes of it
    std::vector<int64_t> bits(c.entries * c.words(), 77);
    run(c, bits);
    EXPECT_NE(bits, std::vector<int64_t>(bits.size(), 77));
    c.options.scale = 1e20;
    expect_rejected(c, "scores may overflow");
  }
}

TEST(Signature, RejectsBadArguments) {
  const Case good = fill(Case{}, 13);
  const auto rejected = [&](const std::string& part, auto spoil) {
    Case c = good;
    spoil(c);
    expect_rejected(c, part);
  };
  rejected("heads_q", [](Case& c) { c.heads_q = 3; });
  rejected("heads_q", [](Case& c) { c.heads_q = 0; });
  rejected("heads_q", [](Case& c) { c.heads_kv = 0; });
  rejected("dim", [](Case& c) { c.dim = 0; });
  rejected("sparsity", [](Case& c) { c.options.sparsity = 0.0; });
  rejected("sparsity", [](Case& c) { c.options.sparsity = 1.01; });
  rejected("sparsity", [](Case& c) { c.options.sparsity = std::nan(""); });
  rejected("window", [](Case& c) { c.options.window = -1; });
  rejected("sinks", [](Case& c) { c.options.sinks = -1; });
  rejected("context", [](Case& c) { c.options.context = -1; });
  rejected("scale", [](Case& c) { c.options.scale = std::nan(""); });
  rejected("q_position[19]", [](Case& c) { c.position[19] = -1; });
}

}  // namespace
}  // namespace swarm_kv
