// Every policy inside the cluster cache against a model that is written for reading and looks at
// all entries in every step.
#include "core/cache_policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <set>

#include "core/cluster_cache.h"
#include "core/entry_pool.h"
#include "core/simulate.h"
#include "io/error.h"

namespace swarm_kv {
namespace {

constexpr int32_t kEntries = 120;
constexpr int64_t kEntryBytes = 8;
const char* const kPolicies[] = {"lru", "lfu", "decayed_frequency", "swarm", "arc"};

std::vector<DriveShape> two_drives() { return {{{1e-5, 1e-9}, 512}, {{3e-5, 4e-9}, 512}}; }

// Entry n on drive n / 4 % 2; every fifth entry has a second copy on the other drive.
Segment placed_segment(const std::vector<DriveShape>& drives) {
  SimulatedLayout layout{.clusters = {},
                         .entries = kEntries,
                         .entry_bytes = 1000,
                         .drives = drives,
                         .placement = "sequential",
                         .router = ""};
  for (int32_t n = 0; n < kEntries; ++n) {
    layout.clusters.members.push_back(n);
    if (n % 4 == 3) layout.clusters.offsets.push_back(layout.clusters.members.size());
  }
  for (int32_t n = 0; n < kEntries; n += 5) {
    layout.clusters.members.push_back(n);
    layout.clusters.offsets.push_back(layout.clusters.members.size());
  }
  return segment_without_data(layout);
}

// What a policy means. `better` orders by worth, for entries that were read and for cached ones.
class Model {
 public:
  explicit Model(int64_t capacity) : capacity_(capacity) {}
  virtual ~Model() = default;
  virtual void prime(const std::vector<int32_t>& activations, int64_t queries) = 0;
  virtual void touch(const std::set<int32_t>& step) = 0;
  virtual double worth(int32_t entry) const = 0;
  // Of two cached entries of equal worth, whether `a` leaves before `b`.
  virtual bool leaves_before(int32_t a, int32_t b) const { return a > b; }
  virtual void entered(int32_t) {}
  virtual void left(int32_t) {}
  virtual int32_t least(const std::set<int32_t>& pinned) const {
    int32_t least = -1;
    for (const int32_t e : cached) {
      if (pinned.contains(e)) continue;
      if (least < 0 || worth(e) < worth(least) ||
          (worth(e) == worth(least) && leaves_before(e, least))) {
        least = e;
      }
    }
    return least;
  }
  void enter(int32_t entry) {
    entered(entry);
    cached.insert(entry);
  }
  void evict(int32_t entry) {
    cached.erase(entry);
    left(entry);
  }
  void admit(const std::vector<int32_t>& read, const std::set<int32_t>& pinned) {
    std::vector<int32_t> offers = read;
    std::sort(offers.begin(), offers.end(), [&](int32_t a, int32_t b) {
      return worth(a) != worth(b) ? worth(a) > worth(b) : a < b;
    });
    for (const int32_t offer : offers) {
      if (static_cast<int64_t>(cached.size()) == capacity_) {
        const int32_t victim = least(pinned);
        if (victim < 0 || worth(offer) <= worth(victim)) return;
        evict(victim);
      }
      enter(offer);
    }
  }

  std::set<int32_t> cached;

 protected:
  int64_t capacity_;
};

class LruModel : public Model {
 public:
  using Model::Model;
  void prime(const std::vector<int32_t>& activations, int64_t queries) override {
    for (int32_t e = 0; e < kEntries; ++e) last_[e] = activations[e] - queries;
  }
  void touch(const std::set<int32_t>& step) override {
    ++now_;
    for (const int32_t e : step) last_[e] = now_;
  }
  double worth(int32_t e) const override { return last_[e]; }

 private:
  int now_ = 0;
  std::vector<double> last_ = std::vector<double>(kEntries);
};

class LfuModel : public Model {
 public:
  using Model::Model;
  void prime(const std::vector<int32_t>& activations, int64_t) override {
    count_.assign(activations.begin(), activations.end());
  }
  void touch(const std::set<int32_t>& step) override {
    for (const int32_t e : step) ++count_[e];
  }
  double worth(int32_t e) const override { return count_[e]; }

 private:
  std::vector<double> count_ = std::vector<double>(kEntries);
};

class DecayedModel : public Model {
 public:
  using Model::Model;
  void prime(const std::vector<int32_t>& activations, int64_t queries) override {
    for (int32_t e = 0; e < kEntries; ++e) heat_[e] = activations[e] / 0.15 / queries;
  }
  void touch(const std::set<int32_t>& step) override {
    for (int32_t e = 0; e < kEntries; ++e) heat_[e] = 0.85 * heat_[e] + step.contains(e);
  }
  // Sums that are equal on paper must be equal here.
  double worth(int32_t e) const override { return std::round(heat_[e] * 1e6); }

 private:
  std::vector<double> heat_ = std::vector<double>(kEntries);
};

class SwarmModel : public Model {
 public:
  using Model::Model;
  void prime(const std::vector<int32_t>& activations, int64_t queries) override {
    for (int32_t e = 0; e < kEntries; ++e) {
      const double p = 1.0 * activations[e] / queries;
      const double wandering = 0.8 * std::sqrt(queries);
      double f = p < 0.5 ? std::min(p / (1 - 2 * p), wandering) : wandering;
      f = std::max(f, (2 * p - 1) * queries);
      counter_[e] = std::floor(f + 0.5);
    }
  }
  void touch(const std::set<int32_t>& step) override {
    ++now_;
    for (int32_t e = 0; e < kEntries; ++e) {
      if (step.contains(e)) {
        ++counter_[e];
      } else if (cached.contains(e) && counter_[e] > 0 && --counter_[e] == 0) {
        zero_since_[e] = now_;
      }
    }
  }
  double worth(int32_t e) const override {
    const auto drives = two_drives();
    double t_base = drives[e / 4 % 2].model.t_base;
    double t_transfer = drives[e / 4 % 2].model.t_transfer * 1000;
    if (e % 5 == 0) {  // the copies' clusters follow 30 others, drives in turn
      const auto& other = drives[e / 5 % 2].model;
      t_base = t_base / 2 + other.t_base / 2;
      t_transfer = t_transfer / 2 + other.t_transfer * 1000 / 2;
    }
    return counter_[e] * t_base + t_transfer;
  }
  bool leaves_before(int32_t a, int32_t b) const override {
    if (counter_[a] == 0 && counter_[b] == 0 && zero_since_[a] != zero_since_[b]) {
      return zero_since_[a] < zero_since_[b];
    }
    return a > b;
  }
  void entered(int32_t e) override {
    if (counter_[e] == 0) zero_since_[e] = now_;
  }

 private:
  int now_ = 0;
  std::vector<double> counter_ = std::vector<double>(kEntries);
  std::vector<int> zero_since_ = std::vector<int>(kEntries);
};

class ArcModel : public Model {
 public:
  using Model::Model;
  void prime(const std::vector<int32_t>& activations, int64_t) override { profile_ = activations; }
  void touch(const std::set<int32_t>& step) override {
    ++now_;
    now_active_ = step;
    for (const int32_t e : step) {
      const double b1 = left_recent_.size(), b2 = left_frequent_.size();
      if (take(recent_, e) || take(frequent_, e)) {
        frequent_.push_front(e);
      } else if (has(left_recent_, e)) {
        target_ = std::min<double>(cached.size(), target_ + std::max(1.0, b2 / b1));
      } else if (has(left_frequent_, e)) {
        target_ = std::max(0.0, target_ - std::max(1.0, b1 / b2));
      }
    }
  }
  double worth(int32_t e) const override {
    if (cached.contains(e)) return now_active_.contains(e) ? 3 : 0;
    return has(left_recent_, e) || has(left_frequent_, e) ? 2 : 1;
  }
  int32_t least(const std::set<int32_t>& pinned) const override {
    std::deque<int32_t> r, f;
    for (const int32_t e : recent_) {
      if (!pinned.contains(e)) r.push_back(e);
    }
    for (const int32_t e : frequent_) {
      if (!pinned.contains(e)) f.push_back(e);
    }
    const auto idle = [&](const std::deque<int32_t>& list) {
      return !list.empty() && !now_active_.contains(list.back());
    };
    // Pinned ones that were skipped do not count for their list either.
    const bool from_recent = static_cast<double>(r.size()) > target_;
    if (idle(from_recent ? r : f)) return (from_recent ? r : f).back();
    if (idle(r)) return r.back();
    if (!f.empty()) return f.back();
    return r.empty() ? -1 : r.back();
  }
  void entered(int32_t e) override {
    if (now_ == 0) {
      (profile_[e] >= 2 ? frequent_ : recent_).push_back(e);
      return;
    }
    const bool known = take(left_recent_, e) || take(left_frequent_, e);
    (known ? frequent_ : recent_).push_front(e);
  }
  void left(int32_t e) override {
    if (take(recent_, e)) {
      left_recent_.push_front(e);
    } else {
      take(frequent_, e);
      left_frequent_.push_front(e);
    }
    const size_t capacity = recent_.size() + frequent_.size() + 1;
    while (!left_recent_.empty() && recent_.size() + left_recent_.size() > capacity) {
      left_recent_.pop_back();
    }
    while (capacity - 1 + left_recent_.size() + left_frequent_.size() > 2 * capacity) {
      (left_frequent_.empty() ? left_recent_ : left_frequent_).pop_back();
    }
  }

 private:
  static bool has(const std::deque<int32_t>& list, int32_t e) {
    return std::find(list.begin(), list.end(), e) != list.end();
  }
  static bool take(std::deque<int32_t>& list, int32_t e) { return std::erase(list, e) > 0; }

  int now_ = 0;
  double target_ = 0;
  std::vector<int32_t> profile_ = std::vector<int32_t>(kEntries);
  std::set<int32_t> now_active_;
  std::deque<int32_t> recent_, frequent_, left_recent_, left_frequent_;
};

std::unique_ptr<Model> model_of(const std::string& policy, int64_t capacity) {
  if (policy == "lru") return std::make_unique<LruModel>(capacity);
  if (policy == "lfu") return std::make_unique<LfuModel>(capacity);
  if (policy == "swarm") return std::make_unique<SwarmModel>(capacity);
  if (policy == "arc") return std::make_unique<ArcModel>(capacity);
  return std::make_unique<DecayedModel>(capacity);
}

// A cache of one segment whose entries hold their number.
struct Cache {
  std::vector<DriveShape> drives = two_drives();
  Budget unlimited{uint64_t{1} << 30};
  EntryPool pool;
  Budget budget;
  ClusterCache cache;
  Segment segment;

  Cache(const std::string& policy, int64_t capacity)
      : pool(4096, 0, 1 << 16, unlimited),
        budget(capacity * ClusterCache::slot_bytes(kEntryBytes)),
        cache(pool, budget, policy, drives),
        segment(placed_segment(drives)) {
    pool.set_entry_bytes(kEntryBytes);
    cache.prepare(segment);
    cache.add(segment);
  }
  ~Cache() { cache.remove(segment); }

  void fill(const std::vector<int32_t>& activations, int64_t queries,
            const std::vector<int32_t>& order) {
    cache.fill(segment, activations, queries, order,
               [this](int32_t entry, int64_t slot) { write(entry, pool.at(slot)); });
  }
  void admit(const std::vector<int32_t>& entries) {
    std::vector<int64_t> slots;
    for (size_t i = 0; i < entries.size(); ++i) {
      slots.push_back(i * kEntryBytes);
      write(entries[i], pool.at(slots.back()));
    }
    cache.admit(segment, entries, slots);
  }
  bool holds(int32_t entry) const { return cache.find(segment, entry) >= 0; }
  std::set<int32_t> held() const {
    std::set<int32_t> held;
    for (int32_t e = 0; e < kEntries; ++e) {
      if (holds(e)) held.insert(e);
    }
    return held;
  }
  bool intact() const {
    for (const int32_t e : held()) {
      int64_t value;
      std::memcpy(&value, pool.at(cache.find(segment, e)), sizeof value);
      if (value != e) return false;
    }
    return true;
  }
  static void write(int32_t entry, std::byte* out) {
    const int64_t value = entry;
    std::memcpy(out, &value, sizeof value);
  }
};

// Steps of a working set that drifts, more or less often activated.
std::vector<std::set<int32_t>> random_steps(std::mt19937& random, int count) {
  std::vector<std::set<int32_t>> steps(count);
  std::uniform_real_distribution<double> uniform(0, 1);
  for (int t = 0; t < count; ++t) {
    for (int32_t e = 0; e < kEntries; ++e) {
      const int rank = (e * 37 + t / 8 * 5) % kEntries;
      if (uniform(random) < 3.0 / (3 + rank)) steps[t].insert(e);
    }
  }
  return steps;
}

struct Outcome {
  int64_t wanted = 0;
  int64_t hits = 0;
  int64_t differences = 0;  // entries that the cache and the model disagree about, all steps
};

Outcome run(const std::string& policy, const std::string& model_name, int64_t capacity,
            unsigned seed, bool primed, bool pins) {
  std::mt19937 random(seed);
  Cache cache(policy, capacity);
  const auto model = model_of(model_name, capacity);
  const auto steps = random_steps(random, 80);
  if (primed) {
    std::vector<int32_t> activations(kEntries), order(kEntries);
    for (int32_t e = 0; e < kEntries; ++e) activations[e] = random() % 65;
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    cache.fill(activations, 64, order);
    model->prime(activations, 64);
    for (int64_t i = 0; i < capacity; ++i) model->enter(order[i]);
  }
  Outcome outcome;
  std::set<int32_t> pinned;  // by a fetch that lasts
  int64_t slot_before = -1;
  for (size_t t = 0; t < steps.size(); ++t) {
    const std::vector<int32_t> step(steps[t].begin(), steps[t].end());
    cache.cache.touch(cache.segment, step);
    model->touch(steps[t]);
    std::vector<int32_t> hits, misses;
    for (const int32_t e : step) (cache.holds(e) ? hits : misses).push_back(e);
    outcome.wanted += step.size();
    outcome.hits += hits.size();
    for (const int32_t e : hits) cache.cache.pin(cache.segment, e);
    std::set<int32_t> busy(hits.begin(), hits.end());
    busy.insert(pinned.begin(), pinned.end());
    // A fetch reads in rounds.
    const size_t half = misses.size() / 2;
    for (const auto& round : {std::vector(misses.begin(), misses.begin() + half),
                              std::vector(misses.begin() + half, misses.end())}) {
      cache.admit(round);
      model->admit(round, busy);
      const auto held = cache.held();
      std::vector<int32_t> differing;
      std::set_symmetric_difference(held.begin(), held.end(), model->cached.begin(),
                                    model->cached.end(), std::back_inserter(differing));
      outcome.differences += differing.size();
      EXPECT_LE(cache.cache.size(), capacity);
      EXPECT_EQ(cache.cache.size(), static_cast<int64_t>(held.size()));
    }
    for (const int32_t e : hits) cache.cache.unpin(cache.segment, e);
    if (pins && t % 10 == 5 && !hits.empty()) {
      pinned.insert(hits.front());
      cache.cache.pin(cache.segment, hits.front());
      slot_before = cache.cache.find(cache.segment, hits.front());
    } else if (pins && t % 10 == 4) {
      for (const int32_t e : pinned) {
        EXPECT_EQ(cache.cache.find(cache.segment, e), slot_before);
        cache.cache.unpin(cache.segment, e);
      }
      pinned.clear();
    }
    EXPECT_TRUE(cache.intact()) << "step " << t;
  }
  for (const int32_t e : pinned) cache.cache.unpin(cache.segment, e);
  return outcome;
}

TEST(CachePolicy, DecidesLikeItsModel) {
  for (const std::string policy : kPolicies) {
    int64_t wanted = 0, hits = 0;
    for (unsigned seed = 0; seed < 12; ++seed) {
      const int64_t capacity = std::vector<int64_t>{1, 7, 20, 45}[seed % 4];
      const Outcome outcome =
          run(policy, policy, capacity, seed, seed % 2 == 1, policy != "arc" && seed >= 6);
      EXPECT_EQ(outcome.differences, 0) << policy << ", seed " << seed;
      wanted += outcome.wanted;
      hits += outcome.hits;
    }
    EXPECT_GT(hits, wanted / 5) << policy;
    EXPECT_LT(hits, wanted) << policy;
  }
}

TEST(CachePolicy, ModelsOfOtherPoliciesAreToldApart) {
  for (const std::string policy : kPolicies) {
    for (const std::string model : kPolicies) {
      if (policy == model) continue;
      EXPECT_GT(run(policy, model, 20, 3, true, false).differences, 20) << policy << " " << model;
    }
  }
}

TEST(CachePolicy, PinnedEntriesStayWithArcToo) {
  for (unsigned seed = 0; seed < 6; ++seed) run("arc", "arc", 20, seed, seed % 2, true);
}

// Long after single precision would have overflowed.
TEST(CachePolicy, DecayedFrequencyGoesOnForever) {
  std::mt19937 random(1);
  Cache cache("decayed_frequency", 30);
  DecayedModel model(30);
  int64_t wanted = 0, hits = 0, expected = 0;
  for (const auto& step : random_steps(random, 2000)) {
    const std::vector<int32_t> entries(step.begin(), step.end());
    cache.cache.touch(cache.segment, entries);
    model.touch(step);
    std::vector<int32_t> missing, missing_of_model;
    for (const int32_t e : entries) {
      if (!cache.holds(e)) missing.push_back(e);
      if (!model.cached.contains(e)) missing_of_model.push_back(e);
    }
    wanted += entries.size();
    hits += entries.size() - missing.size();
    expected += entries.size() - missing_of_model.size();
    cache.admit(missing);
    model.admit(missing_of_model, {});
  }
  EXPECT_NEAR(hits, expected, 0.005 * wanted);
  EXPECT_GT(hits, wanted / 2);
}

TEST(ClusterCache, GivesUpTheEntriesOfLeastWorth) {
  for (const std::string policy : kPolicies) {
    std::mt19937 random(7);
    Cache cache(policy, 60);
    const auto model = model_of(policy, 60);
    for (const auto& step : random_steps(random, 30)) {
      const std::vector<int32_t> entries(step.begin(), step.end());
      cache.cache.touch(cache.segment, entries);
      model->touch(step);
      std::vector<int32_t> missing;
      for (const int32_t e : entries) {
        if (!cache.holds(e)) missing.push_back(e);
      }
      cache.admit(missing);
      model->admit(missing, {});
    }
    ASSERT_EQ(cache.held(), model->cached) << policy;
    ASSERT_EQ(cache.cache.size(), 60) << policy;
    cache.budget.reserve(Use::kIndex, 25 * ClusterCache::slot_bytes(kEntryBytes));
    EXPECT_EQ(cache.cache.size(), 35) << policy;
    EXPECT_TRUE(cache.intact()) << policy;
    for (int i = 0; i < 25; ++i) model->evict(model->least({}));
    EXPECT_EQ(cache.held(), model->cached) << policy;
  }
}

TEST(ClusterCache, PinnedEntriesNeitherMoveNorLeave) {
  for (const std::string policy : kPolicies) {
    Cache cache(policy, 60);
    std::vector<int32_t> entries(60);
    std::iota(entries.begin(), entries.end(), 0);
    cache.cache.touch(cache.segment, entries);
    cache.admit(entries);
    std::vector<int64_t> before;
    for (int32_t e = 0; e < 60; e += 7) {
      cache.cache.pin(cache.segment, e);
      before.push_back(cache.cache.find(cache.segment, e));
    }
    cache.cache.yield(25 * ClusterCache::slot_bytes(kEntryBytes));
    cache.cache.yield(60 * ClusterCache::slot_bytes(kEntryBytes));
    EXPECT_TRUE(cache.intact()) << policy;
    for (int32_t e = 0; e < 60; e += 7) {
      EXPECT_EQ(cache.cache.find(cache.segment, e), before[e / 7]) << policy;
      cache.cache.unpin(cache.segment, e);
    }
    cache.cache.yield(60 * ClusterCache::slot_bytes(kEntryBytes));
    EXPECT_EQ(cache.cache.size(), 0) << policy;
  }
}

TEST(ClusterCache, SegmentsAreOfferedInTheOrderOfTheirNumbers) {
  for (const std::string policy : kPolicies) {
    Cache cache(policy, 60);
    Segment first = placed_segment(cache.drives);
    cache.cache.prepare(first);
    cache.cache.add(first);
    for (int32_t e = 0; e < 4; ++e) Cache::write(e, cache.pool.at(e * kEntryBytes));
    std::vector<ClusterCache::Offer> offers = {{9, 2, 16}, {4, 3, 24}, {9, 1, 8}, {4, 3, 24}};
    cache.cache.admit(
        offers, [&](int64_t number) -> Segment& { return number == 4 ? first : cache.segment; });
    EXPECT_EQ(cache.cache.size(), 3) << policy;  // what was offered twice is held once
    EXPECT_EQ(cache.held(), (std::set<int32_t>{1, 2})) << policy;
    EXPECT_TRUE(cache.intact()) << policy;
    const int64_t slots[] = {cache.cache.find(first, 3), cache.cache.find(cache.segment, 1),
                             cache.cache.find(cache.segment, 2)};
    EXPECT_GE(slots[0], 0) << policy;
    EXPECT_TRUE(std::ranges::is_sorted(slots)) << policy;  // memory is given out from its begin
    cache.cache.remove(first);
  }
}

TEST(CachePolicy, UnknownNamesListTheKnownOnes) {
  try {
    make_cache_policy("best");
    FAIL() << "no exception";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("swarm, decayed_frequency, lru, lfu, arc"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace swarm_kv
