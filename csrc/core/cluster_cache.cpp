#include "core/cluster_cache.h"

#include <algorithm>
#include <utility>

namespace swarm_kv {
namespace {
// Slots are taken from the budget in steps, so that the accountant is not asked per entry.
constexpr int64_t kGrowthSlots = 64;
}  // namespace

ClusterCache::ClusterCache(const CacheMemory& memory, Budget& budget, const std::string& policy,
                           const std::vector<DriveShape>& drives, Residency Segment::* residency)
    : memory_(memory), budget_(budget), policy_(policy), drives_(drives), residency_(residency) {
  budget_.set_yield([this](uint64_t bytes) { yield(bytes); });
}

void ClusterCache::prepare(Segment& segment) const {
  Residency& residency = of(segment);
  residency.slot.assign(segment.entries, -1);
  residency.policy = make_cache_policy(policy_);
  residency.policy->begin(segment, drives_);
  if (residency_ == &Segment::residency) residency.sample.emplace(segment.entries, segment.id);
}

void ClusterCache::add(Segment& segment) {
  segments_.push_back(&segment);
  total_entries_ += segment.entries;
}

void ClusterCache::remove(Segment& segment) {
  const auto found = std::find(segments_.begin(), segments_.end(), &segment);
  if (found == segments_.end()) return;
  segments_.erase(found);
  total_entries_ -= segment.entries;
  for (int32_t entry = 0; entry < segment.entries && of(segment).cached > 0; ++entry) {
    if (of(segment).slot[entry] < 0) continue;
    of(segment).policy->erase(entry);
    free_slot(segment, entry);
  }
}

int64_t ClusterCache::share_of(const Segment& segment) const {
  if (total_entries_ == 0) return 0;
  const int64_t slots =
      static_cast<int64_t>(owners_.size()) + static_cast<int64_t>(budget_.free()) / slot_bytes();
  return std::min(slots, memory_.cache_slots_max()) * segment.entries / total_entries_;
}

bool ClusterCache::grow() {
  const int64_t room = static_cast<int64_t>(budget_.free()) / slot_bytes();
  const int64_t held = static_cast<int64_t>(owners_.size());
  const int64_t more = std::min({kGrowthSlots, room, memory_.cache_slots_max() - held});
  if (more <= 0) return false;
  budget_.reserve(Use::kCache, more * slot_bytes());
  owners_.resize(held + more);
  for (int64_t i = more; i-- > 0;) free_.push_back(static_cast<int32_t>(held + i));
  return true;
}

void ClusterCache::free_slot(Segment& segment, int32_t entry) {
  const int32_t index = of(segment).slot[entry];
  of(segment).slot[entry] = -1;
  --of(segment).cached;
  owners_[index] = Owner{};
  free_.push_back(index);
  --size_;
}

void ClusterCache::evict_popped(Segment& segment, int32_t entry) {
  of(segment).policy->leave(entry);
  free_slot(segment, entry);
}

int64_t ClusterCache::put(Segment& segment, int32_t entry) {
  const int32_t index = free_.back();
  free_.pop_back();
  owners_[index] = Owner{&segment, entry, 0};
  of(segment).slot[entry] = index;
  ++of(segment).cached;
  of(segment).policy->insert(entry);
  ++size_;
  return memory_.cache_slot(index);
}

void ClusterCache::move(int32_t from, int32_t to) {
  memory_.copy(memory_.cache_slot(to), memory_.cache_slot(from));
  owners_[to] = std::exchange(owners_[from], Owner{});
  of(*owners_[to].segment).slot[owners_[to].entry] = to;
}

int32_t ClusterCache::pop_least(Segment& segment) {
  CachePolicy& policy = *of(segment).policy;
  for (int32_t entry = policy.pop(); entry >= 0; entry = policy.pop()) {
    if (owner_of(segment, entry).pins == 0) return entry;
    skipped_.push_back(entry);
  }
  return -1;
}

void ClusterCache::restore_skipped(Segment& segment) {
  for (size_t i = skipped_.size(); i-- > 0;) of(segment).policy->restore(skipped_[i]);
  skipped_.clear();
}

void ClusterCache::make_room(const Segment& segment, int64_t wanted) {
  const auto missing = [&] { return wanted - static_cast<int64_t>(free_.size()); };
  while (missing() > 0 && (grow() || take_from_richest(segment, missing()))) {
  }
}

bool ClusterCache::take_from_richest(const Segment& poor, int64_t wanted) {
  Segment* richest = nullptr;
  int64_t most = 0;
  for (Segment* candidate : segments_) {
    if (candidate == &poor) continue;
    const int64_t over = of(*candidate).cached - share_of(*candidate);
    if (over > most) {
      most = over;
      richest = candidate;
    }
  }
  if (richest == nullptr) return false;
  int64_t taken = 0;
  for (; taken < std::min(wanted, most); ++taken) {
    const int32_t entry = pop_least(*richest);
    if (entry < 0) break;
    evict_popped(*richest, entry);
  }
  restore_skipped(*richest);
  return taken > 0;
}

void ClusterCache::fill(Segment& segment, std::span<const int32_t> activations, int64_t queries,
                        std::span<const int32_t> entries,
                        const std::function<void(int32_t, int64_t)>& copy) {
  of(segment).policy->prime(activations, queries);
  size_t next = 0;
  const auto use_free_slots = [&] {
    while (next < entries.size() && !free_.empty()) {
      copy(entries[next], put(segment, entries[next]));
      ++next;
    }
  };
  do {
    use_free_slots();
  } while (next < entries.size() && grow());
  const int64_t below_share = share_of(segment) - of(segment).cached;
  make_room(segment, std::min<int64_t>(below_share, entries.size() - next));
  use_free_slots();
}

void ClusterCache::admit(Segment& segment, std::span<const int32_t> entries,
                         std::span<const int64_t> slots) {
  Residency& residency = of(segment);
  candidates_.clear();
  for (size_t i = 0; i < entries.size(); ++i) {
    if (residency.slot[entries[i]] >= 0) continue;
    candidates_.push_back({residency.policy->worth(entries[i]), entries[i], slots[i]});
  }
  std::sort(candidates_.begin(), candidates_.end(), [](const Candidate& a, const Candidate& b) {
    return a.worth != b.worth ? a.worth > b.worth : a.entry < b.entry;
  });

  const auto take = [&](const Candidate& candidate) {
    memory_.copy(put(segment, candidate.entry), candidate.slot);
  };
  size_t next = 0;
  const int64_t below_share = share_of(segment) - residency.cached;
  const int64_t room = std::min(below_share, static_cast<int64_t>(candidates_.size()));
  make_room(segment, room);
  while (static_cast<int64_t>(next) < room && !free_.empty()) take(candidates_[next++]);

  for (; next < candidates_.size(); ++next) {
    const int32_t least = pop_least(segment);
    if (least < 0) break;
    if (candidates_[next].worth <= residency.policy->worth(least)) {
      skipped_.push_back(least);
      break;
    }
    evict_popped(segment, least);
    take(candidates_[next]);
  }
  restore_skipped(segment);
}

void ClusterCache::admit(std::vector<Offer>& offers,
                         const std::function<Segment&(int64_t)>& segment_of) {
  const auto key = [](const Offer& offer) { return std::pair(offer.segment, offer.entry); };
  std::ranges::sort(offers, {}, key);
  const auto end = std::ranges::unique(offers, {}, key).begin();  // rows may share entries
  for (auto next = offers.begin(); next != end;) {
    const int64_t number = next->segment;
    entries_.clear();
    slots_.clear();
    for (; next != end && next->segment == number; ++next) {
      entries_.push_back(next->entry);
      slots_.push_back(next->slot);
    }
    admit(segment_of(number), entries_, slots_);
  }
}

void ClusterCache::yield(uint64_t bytes) {
  if (memory_.entry_bytes() == 0) return;
  const int64_t held = static_cast<int64_t>(owners_.size());
  const int64_t fewer = static_cast<int64_t>((bytes + slot_bytes() - 1) / slot_bytes());
  int64_t kept = std::max<int64_t>(0, held - fewer);
  for (int64_t i = held; i-- > kept;) {
    if (owners_[i].pins > 0) kept = i + 1;
  }
  const auto given_up = [kept](int32_t index) { return index >= kept; };
  std::erase_if(free_, given_up);
  for (int64_t i = kept; i < held; ++i) {
    while (owners_[i].segment != nullptr) {
      if (!free_.empty()) {
        move(static_cast<int32_t>(i), free_.back());
        free_.pop_back();
        break;
      }
      // Not the entry that happens to lie there, but its segment's least one leaves.
      Segment& segment = *owners_[i].segment;
      evict_popped(segment, pop_least(segment));
      restore_skipped(segment);
      if (given_up(free_.back())) free_.pop_back();
    }
  }
  owners_.resize(kept);
  memory_.discard_cache(kept, held);
  budget_.release(Use::kCache, (held - kept) * slot_bytes());
}

}  // namespace swarm_kv
