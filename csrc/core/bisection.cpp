#include "core/bisection.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/parallel.h"
#include "core/set_bits.h"

namespace swarm_kv {
namespace {

constexpr int kRounds = 10;
// An exchange has to save this many bits: less is rounding.
constexpr float kLeastGain = 1e-3f;
// Levels of fewer parts share out the entries of each between threads, others the parts.
constexpr size_t kFewParts = 8;
constexpr int64_t kGrainEntries = 1024;
constexpr int64_t kGrainParts = 16;

// A stretch of the order that is to be split, and how many leaves it will hold.
struct Part {
  int64_t begin;
  int64_t end;
  int64_t leaves;

  int64_t size() const { return end - begin; }
  int64_t left_leaves() const { return (leaves + 1) / 2; }
  int64_t middle() const {
    // In proportion to the leaves, so that no leaf exceeds its size.
    return leaves > 1 ? begin + size() * left_leaves() / leaves : begin + (size() + 1) / 2;
  }
};

// Per query: its active entries in both halves, and what it saves when one of them changes sides.
// All zero between two splits.
struct Queries {
  explicit Queries(int64_t count) : active{{}, {}}, saving{{}, {}} {
    for (auto& side : active) side.resize(count, 0);
    for (auto& side : saving) side.resize(count, 0.0f);
  }
  std::vector<int32_t> active[2];
  std::vector<float> saving[2];
  std::vector<int32_t> present;  // queries with any active entry
};

class Bisection {
 public:
  Bisection(const uint64_t* bits, int64_t words, std::vector<int32_t>& entries)
      : bits_(bits), words_(words), entries_(entries), gain_(entries.size()), log2_(2) {
    for (size_t n = 2; n < entries.size() + 2; ++n) log2_.push_back(std::log2(n));
  }

  void split_all(const std::vector<Part>& parts) {
    if (parts.size() < kFewParts) {
      Queries queries(words_ * 64);
      for (const Part& part : parts) split(part, queries);
      return;
    }
    parallel_for(0, static_cast<int64_t>(parts.size()), kGrainParts,
                 [&](int64_t first, int64_t last) {
                   Queries queries(words_ * 64);
                   for (int64_t i = first; i < last; ++i) split(parts[i], queries);
                 });
  }

 private:
  const uint64_t* row(int64_t position) const { return bits_ + entries_[position] * words_; }

  void split(const Part& part, Queries& queries) {
    count(part, queries);
    std::vector<int64_t> left(part.middle() - part.begin);
    std::vector<int64_t> right(part.end - part.middle());
    for (int round = 0; round < kRounds; ++round) {
      find_savings(part, queries);
      find_gains(part, queries);
      sort_by_gain(part.begin, left);
      sort_by_gain(part.middle(), right);
      if (!exchange(part, left, right, queries)) break;
    }
    for (const int32_t query : queries.present) {
      for (auto& side : queries.active) side[query] = 0;
      for (auto& side : queries.saving) side[query] = 0.0f;
    }
    queries.present.clear();
  }

  void count(const Part& part, Queries& queries) {
    for (int64_t i = part.begin; i < part.end; ++i) {
      auto& active = queries.active[i < part.middle() ? 0 : 1];
      for_each_query(row(i), words_, [&](int64_t query) {
        if (queries.active[0][query] + queries.active[1][query] == 0) {
          queries.present.push_back(static_cast<int32_t>(query));
        }
        ++active[query];
      });
    }
  }

  double cost(int64_t active, int64_t half) const {
    return static_cast<double>(active) * (log2_[half] - log2_[active + 1]);
  }

  void find_savings(const Part& part, Queries& queries) const {
    const int64_t halves[2] = {part.middle() - part.begin, part.end - part.middle()};
    for (const int32_t query : queries.present) {
      for (int from = 0; from < 2; ++from) {
        const int64_t here = queries.active[from][query];
        const int64_t there = queries.active[1 - from][query];
        queries.saving[from][query] = 0.0f;
        // One active entry alone costs the same on either side.
        if (here == 0 || here + there < 2) continue;
        const double now = cost(here, halves[from]) + cost(there, halves[1 - from]);
        const double then = cost(here - 1, halves[from]) + cost(there + 1, halves[1 - from]);
        queries.saving[from][query] = static_cast<float>(now - then);
      }
    }
  }

  void find_gains(const Part& part, const Queries& queries) {
    parallel_for(part.begin, part.end, kGrainEntries, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const float* saving = queries.saving[i < part.middle() ? 0 : 1].data();
        float sum = 0.0f;
        for_each_query(row(i), words_, [&](int64_t query) { sum += saving[query]; });
        gain_[i] = sum;
      }
    });
  }

  void sort_by_gain(int64_t begin, std::vector<int64_t>& positions) const {
    std::iota(positions.begin(), positions.end(), begin);
    std::sort(positions.begin(), positions.end(), [&](int64_t a, int64_t b) {
      return gain_[a] != gain_[b] ? gain_[a] > gain_[b] : entries_[a] < entries_[b];
    });
  }

  // Exchanges the pairs that save most, if that saves anything. Gains were found one entry at a
  // time; entries that attract each other, or are wanted by the same queries, save less together,
  // or nothing. So only the better half of the pairs is tried, and less where that was too much.
  bool exchange(const Part& part, const std::vector<int64_t>& left,
                const std::vector<int64_t>& right, Queries& queries) {
    size_t pairs = 0;
    while (pairs < std::min(left.size(), right.size()) &&
           gain_[left[pairs]] + gain_[right[pairs]] > kLeastGain) {
      ++pairs;
    }
    const double before = total_cost(part, queries);
    for (size_t tried = (pairs + 1) / 2; tried > 0; tried /= 4) {
      exchange_first(tried, left, right, queries);
      if (total_cost(part, queries) < before - kLeastGain) return true;
      exchange_first(tried, left, right, queries);  // undoes it
    }
    return false;
  }

  void exchange_first(size_t pairs, const std::vector<int64_t>& left,
                      const std::vector<int64_t>& right, Queries& queries) {
    for (size_t i = 0; i < pairs; ++i) {
      move(left[i], 0, queries);
      move(right[i], 1, queries);
      std::swap(entries_[left[i]], entries_[right[i]]);
    }
  }

  double total_cost(const Part& part, const Queries& queries) const {
    double sum = 0.0;
    for (const int32_t query : queries.present) {
      sum += cost(queries.active[0][query], part.middle() - part.begin) +
             cost(queries.active[1][query], part.end - part.middle());
    }
    return sum;
  }

  void move(int64_t position, int from, Queries& queries) const {
    for_each_query(row(position), words_, [&](int64_t query) {
      --queries.active[from][query];
      ++queries.active[1 - from][query];
    });
  }

  const uint64_t* bits_;
  const int64_t words_;
  std::vector<int32_t>& entries_;
  std::vector<float> gain_;   // [entries], by position: bits saved by changing sides
  std::vector<double> log2_;  // of integers up to the number of entries + 1
};

}  // namespace

std::vector<int64_t> bisect(const uint64_t* bits, int64_t words, int64_t max_leaf,
                            std::vector<int32_t>& entries) {
  Bisection bisection(bits, words, entries);
  const auto count = static_cast<int64_t>(entries.size());
  std::vector<int64_t> ends;
  std::vector<Part> level;
  if (count > 0) level.push_back({0, count, (count - 1) / max_leaf + 1});
  while (!level.empty()) {
    std::vector<Part> next;
    for (const Part& part : level) {
      if (part.leaves == 1) ends.push_back(part.end);
    }
    // Two entries have no order to be found.
    std::erase_if(level, [](const Part& part) { return part.size() <= 2 && part.leaves <= 1; });
    bisection.split_all(level);
    for (const Part& part : level) {
      // Ranges inside a leaf hold no leaf of their own.
      const bool above = part.leaves > 1;
      next.push_back({part.begin, part.middle(), above ? part.left_leaves() : 0});
      next.push_back({part.middle(), part.end, above ? part.leaves - part.left_leaves() : 0});
    }
    level = std::move(next);
  }
  std::sort(ends.begin(), ends.end());
  return ends;
}

}  // namespace swarm_kv
