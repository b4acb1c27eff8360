#include "core/fetch.h"

#include <algorithm>
#include <array>

#include "io/error.h"

namespace swarm_kv {

std::string_view name_of(Purpose purpose) {
  static constexpr std::array<std::string_view, kPurposes> kNames = {"decode", "stream",
                                                                     "prefetch"};
  return kNames[static_cast<int>(purpose)];
}

Purpose purpose_of(std::string_view name) {
  std::string known;
  for (int i = 0; i < kPurposes; ++i) {
    const auto purpose = static_cast<Purpose>(i);
    if (name == name_of(purpose)) return purpose;
    known += (i > 0 ? ", " : "") + std::string(name_of(purpose));
  }
  throw Error(ErrorKind::kArgument,
              "unknown `purpose` \"" + std::string(name) + "\"; choose one of: " + known);
}

void arrive(const WantedList& list, const Wanted& wanted, int64_t slot,
            std::vector<Arrival>& arrivals) {
  for (int32_t i = 0; i < wanted.takers; ++i) {
    arrivals.push_back({list.takers[wanted.first_taker + i], slot});
  }
}

void deliver(std::span<const Arrival> arrivals, size_t rows, Delivery& delivery) {
  delivery.rows.assign(rows + 1, 0);
  for (const Arrival& arrival : arrivals) ++delivery.rows[arrival.taker.row + 1];
  for (size_t row = 0; row < rows; ++row) delivery.rows[row + 1] += delivery.rows[row];
  delivery.ids.resize(arrivals.size());
  delivery.slots.resize(arrivals.size());
  for (const Arrival& arrival : arrivals) {
    const int64_t at = delivery.rows[arrival.taker.row]++;
    delivery.ids[at] = arrival.taker.id;
    delivery.slots[at] = arrival.slot;
  }
  for (size_t row = rows; row > 0; --row) delivery.rows[row] = delivery.rows[row - 1];
  delivery.rows[0] = 0;
}

bool Fetch::holds_memory() const {
  return std::ranges::any_of(rounds, &ReadRound::holds_memory) ||
         (ahead != nullptr && ahead->holds_memory());
}

void Fetch::clear() {
  segment_ids.clear();
  segments.clear();
  pinned.clear();
  step.segments.clear();
  next_read = 0;
  started = 0;
  busy = released = false;
}

}  // namespace swarm_kv
