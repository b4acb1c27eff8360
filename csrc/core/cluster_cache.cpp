#include "core/cluster_cache.h"

#include <algorithm>
#include <cstring>

namespace swarm_kv {
namespace {
// Slots are taken from the budget in steps, so that the accountant is not asked per entry.
constexpr int64_t kGrowthSlots = 64;
}  // namespace

ClusterCache::ClusterCache(EntryPool& pool, Budget& budget, std::unique_ptr<CachePolicy> policy)
    : pool_(pool), budget_(budget), policy_(std::move(policy)) {
  budget_.set_yield([this](uint64_t bytes) { yield(bytes); });
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
  while (!segment.residency.cached.empty()) evict(segment, segment.residency.cached.back());
}

int64_t ClusterCache::slot_bytes() const {
  return pool_.entry_bytes() +
         static_cast<int64_t>(sizeof(Owner) + sizeof(free_[0]) + sizeof(Residency::cached[0]));
}

int64_t ClusterCache::share_of(const Segment& segment) const {
  if (total_entries_ == 0) return 0;
  const int64_t slots =
      static_cast<int64_t>(owners_.size()) + static_cast<int64_t>(budget_.free()) / slot_bytes();
  return std::min(slots, pool_.cache_slots_max()) * segment.entries / total_entries_;
}

bool ClusterCache::grow() {
  const int64_t room = static_cast<int64_t>(budget_.free()) / slot_bytes();
  const int64_t held = static_cast<int64_t>(owners_.size());
  const int64_t more = std::min({kGrowthSlots, room, pool_.cache_slots_max() - held});
  if (more <= 0) return false;
  budget_.reserve(Use::kCache, more * slot_bytes());
  owners_.resize(held + more);
  for (int64_t i = more; i-- > 0;) free_.push_back(static_cast<int32_t>(held + i));
  return true;
}

void ClusterCache::evict(Segment& segment, int32_t entry) {
  Residency& residency = segment.residency;
  const int32_t index = residency.slot[entry];
  residency.slot[entry] = -1;
  auto& cached = residency.cached;
  const int32_t last = cached.back();
  cached[owners_[index].position] = last;
  if (last != entry) owners_[residency.slot[last]].position = owners_[index].position;
  cached.pop_back();
  owners_[index] = Owner{};
  free_.push_back(index);
  --size_;
}

std::byte* ClusterCache::put(Segment& segment, int32_t entry) {
  const int32_t index = free_.back();
  free_.pop_back();
  owners_[index] = Owner{&segment, entry, static_cast<int32_t>(segment.residency.cached.size()), 0};
  segment.residency.slot[entry] = index;
  segment.residency.cached.push_back(entry);
  ++size_;
  return pool_.at(pool_.cache_slot(index));
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
    const int64_t over =
        static_cast<int64_t>(candidate->residency.cached.size()) - share_of(*candidate);
    if (over > most) {
      most = over;
      richest = candidate;
    }
  }
  if (richest == nullptr) return false;
  const auto victims = coldest(*richest, std::min(wanted, most));
  for (const int32_t entry : victims) evict(*richest, entry);
  return !victims.empty();
}

std::vector<int32_t> ClusterCache::coldest(const Segment& segment, int64_t count) {
  const Residency& residency = segment.residency;
  std::vector<int32_t> victims;
  victims.reserve(residency.cached.size());
  for (const int32_t entry : residency.cached) {
    if (!pinned(segment, entry)) victims.push_back(entry);
  }
  const auto colder = [&](int32_t a, int32_t b) {
    return residency.heat[a] != residency.heat[b] ? residency.heat[a] < residency.heat[b] : a > b;
  };
  const int64_t found = std::min(count, static_cast<int64_t>(victims.size()));
  std::partial_sort(victims.begin(), victims.begin() + found, victims.end(), colder);
  victims.resize(found);
  return victims;
}

void ClusterCache::fill(Segment& segment, std::span<const int32_t> activations, int64_t queries,
                        std::span<const int32_t> entries,
                        const std::function<void(int32_t, std::byte*)>& copy) {
  policy_->prime(segment.residency, activations, queries);
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
  const auto cached = static_cast<int64_t>(segment.residency.cached.size());
  make_room(segment, std::min<int64_t>(share_of(segment) - cached, entries.size() - next));
  use_free_slots();
}

void ClusterCache::admit(Segment& segment, std::span<const int32_t> entries,
                         std::span<const int64_t> slots) {
  Residency& residency = segment.residency;
  struct Offer {
    float heat;
    int32_t entry;
    int64_t slot;
  };
  std::vector<Offer> offers;
  offers.reserve(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    if (residency.slot[entries[i]] >= 0) continue;
    offers.push_back({residency.heat[entries[i]], entries[i], slots[i]});
  }
  const auto hotter = [](const Offer& a, const Offer& b) {
    return a.heat != b.heat ? a.heat > b.heat : a.entry < b.entry;
  };
  std::sort(offers.begin(), offers.end(), hotter);

  const auto admit_offer = [&](const Offer& offer) {
    std::memcpy(put(segment, offer.entry), pool_.at(offer.slot), pool_.entry_bytes());
  };
  size_t next = 0;
  const int64_t below_share = share_of(segment) - static_cast<int64_t>(residency.cached.size());
  const int64_t room = std::min(below_share, static_cast<int64_t>(offers.size()));
  make_room(segment, room);
  while (static_cast<int64_t>(next) < room && !free_.empty()) admit_offer(offers[next++]);
  if (next == offers.size()) return;

  for (const int32_t victim : coldest(segment, static_cast<int64_t>(offers.size() - next))) {
    if (offers[next].heat <= residency.heat[victim]) break;
    evict(segment, victim);
    admit_offer(offers[next++]);
  }
}

void ClusterCache::yield(uint64_t bytes) {
  if (pool_.entry_bytes() == 0) return;
  const int64_t held = static_cast<int64_t>(owners_.size());
  const int64_t fewer = static_cast<int64_t>((bytes + slot_bytes() - 1) / slot_bytes());
  int64_t kept = std::max<int64_t>(0, held - fewer);
  for (int64_t i = held; i-- > kept;) {
    if (owners_[i].pins > 0) kept = i + 1;
  }
  for (int64_t i = kept; i < held; ++i) {
    if (owners_[i].segment != nullptr) evict(*owners_[i].segment, owners_[i].entry);
  }
  std::erase_if(free_, [kept](int32_t index) { return index >= kept; });
  owners_.resize(kept);
  pool_.discard_cache(kept, held);
  budget_.release(Use::kCache, (held - kept) * slot_bytes());
}

}  // namespace swarm_kv
