#include "core/counter_policy.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/coalesce.h"
#include "core/segment.h"
#include "io/error.h"

namespace swarm_kv {

void CounterPolicy::begin(const Segment& segment, const std::vector<DriveShape>& drives) {
  value_.assign(segment.entries, 0);
  cached_.assign(segment.entries, 0);
  cost_.assign(segment.entries, 0);
  for (int32_t entry = 0; entry < segment.entries; ++entry) {
    const auto copies = segment.routing.copies_of(entry);
    const auto count = static_cast<double>(copies.size());
    Cost cost{0, 0};
    for (const int32_t position : copies) {
      const io::DeviceModel& model = drives[segment.placement.drive[position]].model;
      cost.t_base += model.t_base / count;
      cost.t_transfer += model.t_transfer * static_cast<double>(segment.entry_bytes) / count;
    }
    size_t same = std::find(costs_.begin(), costs_.end(), cost) - costs_.begin();
    if (same == costs_.size() && same <= std::numeric_limits<uint16_t>::max()) {
      costs_.push_back(cost);
    }
    cost_[entry] = static_cast<uint16_t>(std::min(same, costs_.size() - 1));
  }
  queue_ = EvictionQueue<int32_t>(segment.entries, costs_.size());
}

// Up with probability p, down with 1 - p, not below 0: below one half it settles at p / (1 - 2p),
// above it drifts, and at one half it grows with the square root of the steps.
void CounterPolicy::prime(std::span<const int32_t> activations, int64_t queries) {
  const auto steps = static_cast<double>(queries);
  const double wandering = 0.8 * std::sqrt(steps);
  for (size_t entry = 0; entry < activations.size(); ++entry) {
    const double p = activations[entry] / steps;
    const double settled = p < 0.5 ? std::min(p / (1 - 2 * p), wandering) : wandering;
    value_[entry] = static_cast<int32_t>(std::max((2 * p - 1) * steps, settled) + 0.5);
  }
}

int32_t CounterPolicy::counter(int32_t entry) const {
  return cached_[entry] ? std::max(0, value_[entry] - step_) : value_[entry];
}

void CounterPolicy::touch(std::span<const int32_t> entries) {
  ++step_;
  for (const int32_t entry : entries) {
    // A cached one had counter max(0, value - (step - 1)) and has one more now.
    value_[entry] = cached_[entry] ? std::max(value_[entry], step_ - 1) + 2 : value_[entry] + 1;
  }
}

double CounterPolicy::worth(int32_t entry) const {
  const Cost& cost = costs_[cost_[entry]];
  return counter(entry) * cost.t_base + cost.t_transfer;
}

void CounterPolicy::insert(int32_t entry) {
  value_[entry] += step_;
  cached_[entry] = 1;
  restore(entry);
}

int32_t CounterPolicy::pop() {
  int32_t least = -1;
  for (size_t lane = 0; lane < queue_.lanes(); ++lane) {
    const int32_t entry = queue_.top([this](int32_t e) { return value_[e]; }, lane);
    if (entry >= 0 && (least < 0 || worth(entry) < worth(least))) least = entry;
  }
  if (least >= 0) queue_.pop(cost_[least]);
  return least;
}

void CounterPolicy::restore(int32_t entry) { queue_.insert(entry, value_[entry], cost_[entry]); }

void CounterPolicy::leave(int32_t entry) {
  value_[entry] = counter(entry);
  cached_[entry] = 0;
}

void CounterPolicy::erase(int32_t entry) {
  queue_.erase(entry);
  leave(entry);
}

uint64_t CounterPolicy::bytes() const {
  return value_.size() * (sizeof(value_[0]) + sizeof(cached_[0]) + sizeof(cost_[0]) + 1) +
         costs_.size() * sizeof(Cost);
}

}  // namespace swarm_kv
