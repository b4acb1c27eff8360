#include "core/device_step.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "core/device_tier.h"

namespace swarm_kv {
namespace {

// Ends a step on the device, whatever has failed.
class Ending {
 public:
  explicit Ending(DeviceTier& tier) : tier_(tier) {}
  ~Ending() {
    try {
      tier_.end();
    } catch (const std::exception&) {  // a device that fails has said so to the step
    }
  }
  Ending(const Ending&) = delete;
  Ending& operator=(const Ending&) = delete;

 private:
  DeviceTier& tier_;
};

// What the host has goes to the device batch by batch.
class Feed {
 public:
  Feed(Store& store, DeviceTier& tier, std::span<const Row> rows,
       const std::function<void(const DevicePart&)>& attend)
      : store_(store), tier_(tier), rows_(rows), attend_(attend) {}

  // The entries of a delivery, and those of `own` whose `kept` is -1; none for an empty `kept`.
  void run(const Delivery& delivery, std::span<const int64_t> own, std::span<const int64_t> kept) {
    items_.clear();
    for (size_t i = 0; i < delivery.slots.size(); ++i) items_.push_back({delivery.slots[i], i});
    for (size_t i = 0; i < kept.size(); ++i) {
      if (kept[i] < 0) items_.push_back({own[i], delivery.slots.size() + i});
    }
    std::ranges::sort(items_);
    slots_.resize(delivery.slots.size() + kept.size());
    const std::span<const int64_t> all(slots_);
    for (auto next = items_.begin(); next != items_.end();) {
      std::ranges::fill(slots_, -1);
      next = load(next);
      attend_({delivery, all.first(delivery.slots.size()), all.subspan(delivery.slots.size())});
      store_.offer_to_device(rows_, delivery, all.first(delivery.slots.size()));
      tier_.done();
    }
  }

  void load_kept(std::span<const DeviceTier::Piece> missing) {
    while (!missing.empty()) {
      const auto part = missing.first(std::min<size_t>(missing.size(), tier_.capacity()));
      missing = missing.subspan(part.size());
      pieces_.assign(part.begin(), part.end());
      std::ranges::sort(pieces_, {}, &DeviceTier::Piece::from);
      tier_.load(pieces_);
      tier_.done();
    }
  }

 private:
  using Items = std::vector<std::pair<int64_t, size_t>>;  // (slot in the pool, place in slots_)

  // Loads a batch of distinct entries from `next` on; returns where the following one begins.
  Items::iterator load(Items::iterator next) {
    pieces_.clear();
    for (; next != items_.end(); ++next) {
      if (pieces_.empty() || pieces_.back().from != next->first) {
        const auto count = static_cast<int64_t>(pieces_.size());
        if (count == tier_.capacity()) break;
        pieces_.push_back({next->first, tier_.batch_slot(count)});
      }
      slots_[next->second] = pieces_.back().to;
    }
    tier_.load(pieces_);
    return next;
  }

  Store& store_;
  DeviceTier& tier_;
  const std::span<const Row> rows_;
  const std::function<void(const DevicePart&)>& attend_;
  Items items_;
  std::vector<int64_t> slots_;
  std::vector<DeviceTier::Piece> pieces_;
};

}  // namespace

void step_on_device(Store& store, std::span<const Row> rows, std::span<const int64_t> own,
                    int64_t ahead, const std::function<void(const DevicePart&)>& attend,
                    FetchSeconds& seconds) {
  DeviceTier& tier = *store.device();
  const std::lock_guard turn(tier.turn());
  tier.begin();
  std::optional<Ticket> ticket;
  const Ending ending(tier);  // before the ticket's: copies read from its memory
  Feed feed(store, tier, rows, attend);

  std::vector<int64_t> kept;
  std::vector<DeviceTier::Piece> missing;
  store.keep_window(own, kept, missing);
  try {
    feed.load_kept(missing);
  } catch (...) {
    store.forget_window(own);
    throw;
  }

  const auto began = std::chrono::steady_clock::now();
  Delivery part, on_device;
  ticket.emplace(store, store.submit(rows, Purpose::kDecode, ahead, part, &on_device));
  seconds.submitting = FetchSeconds::since(began);
  attend({on_device, on_device.slots, kept});
  feed.run(part, own, kept);
  for (bool more = true; more;) {
    tier.settle();  // the slots of this part go with the next
    const auto asked = std::chrono::steady_clock::now();
    more = ticket->wait(part);
    seconds.waiting += FetchSeconds::since(asked);
    feed.run(part, {}, {});
  }
}

}  // namespace swarm_kv
