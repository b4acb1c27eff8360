#include "core/arc_policy.h"

#include <algorithm>

#include "core/segment.h"

namespace swarm_kv {

void ArcPolicy::begin(const Segment& segment, const std::vector<DriveShape>&) {
  entries_ = static_cast<int32_t>(segment.entries);
  next_.resize(entries_ + kLists);
  previous_.resize(entries_ + kLists);
  for (int32_t ring = entries_; ring < entries_ + kLists; ++ring)
    next_[ring] = previous_[ring] = ring;
  touched_.assign(entries_, 0);
  list_.assign(entries_, kNone);
}

void ArcPolicy::prime(std::span<const int32_t> activations, int64_t) {
  for (size_t entry = 0; entry < activations.size(); ++entry) {
    touched_[entry] = -std::min(activations[entry], 2);
  }
}

void ArcPolicy::link_after(int32_t before, int32_t entry, List list) {
  next_[entry] = next_[before];
  previous_[entry] = before;
  previous_[next_[before]] = entry;
  next_[before] = entry;
  list_[entry] = list;
  ++size_[list];
}

void ArcPolicy::unlink(int32_t entry) {
  next_[previous_[entry]] = next_[entry];
  previous_[next_[entry]] = previous_[entry];
  --size_[list_[entry]];
}

void ArcPolicy::touch(std::span<const int32_t> entries) {
  ++step_;
  for (const int32_t entry : entries) {
    touched_[entry] = step_;
    const auto recent = static_cast<double>(size_[kLeftRecent]);
    const auto frequent = static_cast<double>(size_[kLeftFrequent]);
    switch (list_[entry]) {
      case kRecent:
      case kFrequent:
        unlink(entry);
        link_newest(kFrequent, entry);
        break;
      case kLeftRecent:
        target_ = std::min(target_ + std::max(1.0, frequent / recent), 1.0 * cached());
        break;
      case kLeftFrequent:
        target_ = std::max(target_ - std::max(1.0, recent / frequent), 0.0);
        break;
      default:
        break;
    }
  }
}

// Cached entries of this step stay; else whatever was read comes in, first what had left before.
double ArcPolicy::worth(int32_t entry) const {
  if (list_[entry] <= kFrequent) return touched_[entry] == step_ ? 3 : 0;
  return list_[entry] == kNone ? 1 : 2;
}

void ArcPolicy::insert(int32_t entry) {
  if (step_ == 0) {
    link_oldest(touched_[entry] <= -2 ? kFrequent : kRecent, entry);
    return;
  }
  const bool known = list_[entry] != kNone;
  if (known) unlink(entry);
  link_newest(known ? kFrequent : kRecent, entry);
}

int32_t ArcPolicy::pop() {
  if (cached() == 0) return -1;
  const int32_t recent = previous_[head(kRecent)];
  const int32_t frequent = previous_[head(kFrequent)];
  const auto idle = [this](List list, int32_t oldest) {
    return size_[list] > 0 && touched_[oldest] != step_;
  };
  bool from_recent = static_cast<double>(size_[kRecent]) > target_;
  if (!idle(from_recent ? kRecent : kFrequent, from_recent ? recent : frequent)) {
    from_recent = idle(kRecent, recent) || size_[kFrequent] == 0;
  }
  const int32_t oldest = from_recent ? recent : frequent;
  unlink(oldest);
  return oldest;
}

void ArcPolicy::restore(int32_t entry) { link_oldest(static_cast<List>(list_[entry]), entry); }

void ArcPolicy::leave(int32_t entry) {
  link_newest(list_[entry] == kRecent ? kLeftRecent : kLeftFrequent, entry);
  const int64_t capacity = cached() + 1;
  const auto drop_oldest = [&](List list) {
    const int32_t oldest = previous_[head(list)];
    unlink(oldest);
    list_[oldest] = kNone;
  };
  while (size_[kLeftRecent] > 0 && size_[kRecent] + size_[kLeftRecent] > capacity) {
    drop_oldest(kLeftRecent);
  }
  while (cached() + size_[kLeftRecent] + size_[kLeftFrequent] > 2 * capacity) {
    drop_oldest(size_[kLeftFrequent] > 0 ? kLeftFrequent : kLeftRecent);
  }
}

void ArcPolicy::erase(int32_t entry) {
  unlink(entry);
  leave(entry);
}

uint64_t ArcPolicy::bytes() const {
  return touched_.size() * (3 * sizeof(int32_t) + sizeof(list_[0])) + 2 * kLists * sizeof(int32_t);
}

}  // namespace swarm_kv
