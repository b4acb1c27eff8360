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

std::vector<int64_t> signatures(const Case& c) {
  std::vector<int64_t> bits(c.entries * c.words(), -1);  // what was there must not survive
  activation_signatures(c.q.data(), c.heads_q, c.queries, c.k.data(), c.heads_kv, c.entries, c.dim,
                        c.position.data(), c.options, bits.data());
  return bits;
}

bool is_set(const Case& c, const std::vector<int64_t>& bits, int64_t entry, int64_t t) {
  return (static_cast<uint64_t>(bits[entry * c.words() + t / 64]) >> (t % 64)) & 1;
}

// Mean over heads of the softmax of query t, in double, from the definition. `kv_head` maps query
// heads to key heads.
template <typename KvHead>
std::vector<double> reference_scores(const Case& c, int64_t t, KvHead kv_head) {
  const int64_t seen = std::min(c.position[t], c.entries - 1) + 1;
  std::vector<double> mean(c.entries, 0.0);
  for (int64_t h = 0; h < c.heads_q; ++h) {
    std::vector<double> score(seen);
    for (int64_t j = 0; j < seen; ++j) {
      double dot = 0.0;
      for (int64_t d = 0; d < c.dim; ++d) {
        dot += static_cast<double>(c.q[(h * c.queries + t) * c.dim + d]) *
               c.k[(kv_head(h) * c.entries + j) * c.dim + d];
      }
      score[j] = dot * c.options.scale;
    }
    const double maximum = *std::max_element(score.begin(), score.end());
    double sum = 0.0;
    for (double& s : score) sum += s = std::exp(s - maximum);
    for (int64_t j = 0; j < seen; ++j) mean[j] += score[j] / sum / static_cast<double>(c.heads_q);
  }
  return mean;
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
    std::vector<double> scores;
    if (t < c.queries) {
      scores = reference_scores(c, t, kv_head);
      for (int64_t j = c.options.sinks; j < c.entries; ++j) {
        if (j <= c.position[t] - c.options.window) eligible.push_back(j);
      }
    }
    std::vector<double> ranked;
    for (const int64_t j : eligible) ranked.push_back(scores[j]);
    std::sort(ranked.rbegin(), ranked.rend());
    const int64_t expected = std::min<int64_t>(budget, static_cast<int64_t>(ranked.size()));
    int64_t count = 0;
    for (int64_t j = 0; j < c.entries; ++j) count += is_set(c, bits, j, t);
    if (count != expected) {
      return std::to_string(count) + " activated, not " + std::to_string(expected) + where;
    }
    if (expected == 0) continue;
    const double threshold = ranked[expected - 1];
    int64_t inside = 0;
    for (const int64_t j : eligible) {
      const bool set = is_set(c, bits, j, t);
      inside += set;
      if (set ? scores[j] < threshold * (1 - kTolerance)
              : scores[j] > threshold * (1 + kTolerance)) {
        return "entry " + std::to_string(j) + where;
      }
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

TEST(Signature, MatchesTheDefinition) {
  // Sizes on both sides of every block: 6 keys, 96 keys, 32 queries, 64 queries.
  const Case cases[] = {
      {.heads_q = 1, .queries = 1, .heads_kv = 1, .entries = 10, .dim = 1},
      {.heads_q = 1, .queries = 1, .heads_kv = 1, .entries = 97, .dim = 64},
      {.heads_q = 3, .queries = 31, .heads_kv = 1, .entries = 96, .dim = 5},
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
      const Case filled = fill(c, ++seed);
      ASSERT_EQ(mismatch(filled, signatures(filled)), "") << seed;
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
  Case c{.heads_q = 6, .queries = 300, .heads_kv = 2, .entries = 700, .dim = 16};
  c.options = options(0.1, 32, 4);
  c = fill(c, 9);
  const int threads = num_threads();
  set_num_threads(1);
  const std::vector<int64_t> expected = signatures(c);
  for (const int other : {2, 3, 8}) {
    set_num_threads(other);
    EXPECT_EQ(signatures(c), expected) << other;
  }
  set_num_threads(threads);
  EXPECT_NE(signatures(fill(c, 10)), expected);
}

// `part` must be in the message, and `bits` untouched.
void expect_rejected(const Case& c, const std::string& part) {
  std::vector<int64_t> bits(c.entries * c.words(), 77);
  try {
    activation_signatures(c.q.data(), c.heads_q, c.queries, c.k.data(), c.heads_kv, c.entries,
                          c.dim, c.position.data(), c.options, bits.data());
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
  }
}

TEST(Signature, RejectsScoresThatOverflow) {
  for (const float sign : {1.0f, -1.0f}) {
    Case c = fill(Case{}, 12);
    c.options.window = 1;
    for (float& x : c.q) x = 1e30f;
    for (float& x : c.k) x = sign * 1e30f;
    EXPECT_THROW(signatures(c), Error);
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
