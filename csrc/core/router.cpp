#include "core/router.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "core/registry.h"

namespace swarm_kv {
namespace {

// Set of numbers that keeps its memory. Zero cannot be in it.
class NumberSet {
 public:
  // Empties it and makes room for `count` numbers.
  void reset(size_t count) { slots_.assign(std::bit_ceil(2 * count + 1), 0); }
  bool contains(uint64_t number) const { return slots_[find(number)] == number; }
  void insert(uint64_t number) { slots_[find(number)] = number; }

 private:
  size_t find(uint64_t number) const {
    const size_t mask = slots_.size() - 1;
    size_t at = (number * 0x9e3779b97f4a7c15) >> 20 & mask;
    while (slots_[at] != 0 && slots_[at] != number) at = (at + 1) & mask;
    return at;
  }
  std::vector<uint64_t> slots_;
};

void take_first(const WantedList& wanted, std::vector<int32_t>& chosen) {
  chosen.clear();
  for (const Wanted& entry : wanted.entries) {
    chosen.push_back(wanted.candidates[entry.first_candidate].position);
  }
}

// How many drives hold a candidate.
int32_t replication_of(std::span<const Candidate> candidates, const Placement& placement) {
  int32_t drives = 0;
  for (size_t c = 0; c < candidates.size(); ++c) {
    const uint8_t drive = placement.drive[candidates[c].position];
    const auto before = candidates.first(c);
    drives += std::none_of(before.begin(), before.end(), [&](const Candidate& other) {
      return placement.drive[other.position] == drive;
    });
  }
  return drives;
}

void balance(std::span<Segment* const> segments, const WantedList& wanted, const DriveLoad& drives,
             std::vector<int32_t>& chosen) {
  // Kept by each thread, so that a step as large as the last one allocates nothing.
  static thread_local std::vector<std::pair<int32_t, int32_t>> shared;  // replication, entry
  static thread_local std::vector<double> busy;
  static thread_local NumberSet open_shares;  // shares that some entry is read from already
  const size_t count = wanted.entries.size();
  const auto candidates_of = [&](const Wanted& entry) {
    return std::span(wanted.candidates).subspan(entry.first_candidate, entry.candidates);
  };
  busy.clear();
  for (size_t drive = 0; drive < drives.size(); ++drive) busy.push_back(drives.queued(drive));
  open_shares.reset(count);
  chosen.resize(count);
  const auto choose = [&](size_t i) {
    const Wanted& entry = wanted.entries[i];
    const Segment& segment = *segments[entry.segment];
    const auto drive_of = [&](const Candidate& copy) {
      return segment.placement.drive[copy.position];
    };
    const auto share_of = [&](const Candidate& copy) {
      return (static_cast<uint64_t>(entry.segment + 1) << 48) ^
             (static_cast<uint64_t>(copy.group) << 8) ^ drive_of(copy);
    };
    // The first entry of a share pays for the request, the rest of the share rides along.
    const auto cost_of = [&](const Candidate& copy) {
      const uint64_t requests = open_shares.contains(share_of(copy)) ? 0 : 1;
      return drives.seconds(drive_of(copy), requests, segment.entry_bytes);
    };
    const auto candidates = candidates_of(entry);
    Candidate best = candidates.front();
    double cost = cost_of(best);
    for (const Candidate& copy : candidates.subspan(1)) {
      const double other = cost_of(copy);
      if (std::pair(busy[drive_of(copy)] + other, drive_of(copy)) <
          std::pair(busy[drive_of(best)] + cost, drive_of(best))) {
        best = copy;
        cost = other;
      }
    }
    busy[drive_of(best)] += cost;
    open_shares.insert(share_of(best));
    chosen[i] = best.position;
  };
  shared.clear();
  for (size_t i = 0; i < count; ++i) {
    const Wanted& entry = wanted.entries[i];
    const int32_t replication =
        entry.candidates == 1
            ? 1
            : replication_of(candidates_of(entry), segments[entry.segment]->placement);
    if (replication == 1) {
      choose(i);
    } else {
      shared.emplace_back(replication, static_cast<int32_t>(i));
    }
  }
  std::sort(shared.begin(), shared.end());
  for (const auto& [replication, i] : shared) choose(i);
}

class Swarm : public Router {
 public:
  bool unites() const override { return true; }
  void route(std::span<Segment* const> segments, const WantedList& wanted, const DriveLoad& drives,
             std::vector<int32_t>& chosen) const override {
    balance(segments, wanted, drives, chosen);
  }
};

class BalanceOnly : public Swarm {
 public:
  bool unites() const override { return false; }
};

class DedupOnly : public Router {
 public:
  bool unites() const override { return true; }
  void route(std::span<Segment* const>, const WantedList& wanted, const DriveLoad&,
             std::vector<int32_t>& chosen) const override {
    take_first(wanted, chosen);
  }
};

class Static : public DedupOnly {
 public:
  bool unites() const override { return false; }
};

const Registry<Router>& registry() {
  static const Registry<Router> kRegistry(
      "router", {registered<Router, Swarm>("swarm"), registered<Router, Static>("static"),
                 registered<Router, DedupOnly>("dedup_only"),
                 registered<Router, BalanceOnly>("balance_only")});
  return kRegistry;
}

}  // namespace

std::unique_ptr<Router> make_router(const std::string& name) { return registry().make(name); }

}  // namespace swarm_kv
