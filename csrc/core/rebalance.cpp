#include "core/rebalance.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace swarm_kv {
namespace {

// CPU seconds per entry that evening out takes (measured: 0.1 to 0.25 us), and the part of the mean
// up to which drives count as even: the last steps move little.
constexpr double kPlanning = 2e-7;
constexpr double kEven = 1.0 / 32;
// What a move may cost its new drive, in what it saves the old one: good moves come first.
constexpr double kWorth[] = {1, 3, std::numeric_limits<double>::infinity()};

struct Item {
  uint64_t offset;
  uint64_t length;
  int32_t wanted;
};

// What one drive reads, by offset, and how long it takes for that.
class Queue {
 public:
  void reset(const DriveLoad& drives, size_t drive) {
    model_ = {drives.seconds(drive, 1, 0), drives.seconds(drive, 0, 1)};
    seconds_ = drives.queued(drive);
    items_.clear();
  }

  double seconds() const { return seconds_; }
  // What rounding may leave of nothing.
  double negligible() const { return model_.t_base * 1e-6; }
  const std::vector<Item>& items() const { return items_; }

  void fill(Item item) { items_.push_back(item); }
  void filled() {
    std::sort(items_.begin(), items_.end(),
              [](const Item& a, const Item& b) { return a.offset < b.offset; });
    if (!items_.empty()) seconds_ += model_.t_base;
    for (size_t i = 0; i < items_.size(); ++i) {
      seconds_ += transfer(items_[i]) + (i > 0 ? between(items_[i - 1], items_[i]) : 0);
    }
  }

  // Seconds less without the item at `index`, seconds more with a further one.
  double saved(size_t index) const {
    const bool first = index == 0, last = index + 1 == items_.size();
    double saved = transfer(items_[index]);
    if (first && last) return saved + model_.t_base;
    if (!first) saved += between(items_[index - 1], items_[index]);
    if (!last) saved += between(items_[index], items_[index + 1]);
    if (!first && !last) saved -= between(items_[index - 1], items_[index + 1]);
    return saved;
  }
  double added(const Item& item) const {
    if (items_.empty()) return transfer(item) + model_.t_base;
    const auto next = after(item);
    double added = transfer(item);
    // The same bytes once more are another read.
    if (next != items_.begin() && (next - 1)->offset == item.offset) return added + model_.t_base;
    if (next != items_.begin()) added += between(*(next - 1), item);
    if (next != items_.end()) added += between(item, *next);
    if (next != items_.begin() && next != items_.end()) added -= between(*(next - 1), *next);
    return added;
  }

  void remove(size_t index) {
    seconds_ -= saved(index);
    items_.erase(items_.begin() + static_cast<std::ptrdiff_t>(index));
  }
  void insert(const Item& item) {
    seconds_ += added(item);
    items_.insert(after(item), item);
  }

 private:
  double transfer(const Item& item) const {
    return static_cast<double>(item.length) * model_.t_transfer;
  }
  // Two neighbours are one read, with the gap between them, or two.
  double between(const Item& a, const Item& b) const {
    const uint64_t end = a.offset + a.length;
    const uint64_t gap = b.offset > end ? b.offset - end : 0;
    return std::min(static_cast<double>(gap) * model_.t_transfer, model_.t_base);
  }
  std::vector<Item>::const_iterator after(const Item& item) const {
    return std::upper_bound(items_.begin(), items_.end(), item,
                            [](const Item& a, const Item& b) { return a.offset < b.offset; });
  }

  io::DeviceModel model_;
  double seconds_ = 0;
  std::vector<Item> items_;
};

class Rebalancer {
 public:
  Rebalancer(std::span<Segment* const> segments, const WantedList& wanted, const DriveLoad& drives,
             std::vector<int32_t>& chosen)
      : segments_(segments), wanted_(wanted), chosen_(chosen) {
    // Kept by each thread, so that a step as large as the last one allocates nothing.
    static thread_local std::vector<Queue> kept;
    if (kept.size() < drives.size()) kept.resize(drives.size());
    queues_ = std::span(kept).first(drives.size());
    for (size_t drive = 0; drive < drives.size(); ++drive) queues_[drive].reset(drives, drive);
    for (size_t i = 0; i < chosen.size(); ++i) {
      const auto index = static_cast<int32_t>(i);
      queues_[drive_of(index, chosen[i])].fill(item_of(index, chosen[i]));
    }
    for (Queue& queue : queues_) queue.filled();
  }

  void run() {
    if (lag() <= kPlanning * static_cast<double>(chosen_.size())) return;
    for (const double worth : kWorth) {
      do {
        if (lag() <= kEven * mean()) return;
      } while (relieve(busiest(), mean(), worth));
    }
  }

 private:
  Queue& busiest() {
    return *std::max_element(queues_.begin(), queues_.end(), [](const Queue& a, const Queue& b) {
      return a.seconds() < b.seconds();
    });
  }
  double mean() const {
    const auto add = [](double sum, const Queue& queue) { return sum + queue.seconds(); };
    return std::accumulate(queues_.begin(), queues_.end(), 0.0, add) /
           static_cast<double>(queues_.size());
  }
  // How much later than the mean the last drive ends.
  double lag() { return busiest().seconds() - mean(); }

  size_t drive_of(int32_t wanted, int32_t position) const {
    return segments_[wanted_.entries[wanted].segment]->placement.drive[position];
  }
  Item item_of(int32_t wanted, int32_t position) const {
    const Segment& segment = *segments_[wanted_.entries[wanted].segment];
    return {segment.offset_of(position), static_cast<uint64_t>(segment.entry_bytes), wanted};
  }

  // Moves entries away, from the first on and then from the last on, until `goal` is reached.
  bool relieve(Queue& busiest, double goal, double worth) {
    bool moved = false;
    for (size_t i = 0; i < busiest.items().size() && busiest.seconds() > goal;) {
      if (move(busiest, i, worth)) {
        moved = true;
      } else {
        ++i;
      }
    }
    for (size_t i = busiest.items().size(); i-- > 0 && busiest.seconds() > goal;) {
      moved |= move(busiest, i, worth);
    }
    return moved;
  }

  bool move(Queue& from, size_t index, double worth) {
    const double saved = from.saved(index);
    if (saved <= from.negligible()) return false;  // inside a read
    const int32_t wanted = from.items()[index].wanted;
    const Wanted& entry = wanted_.entries[wanted];
    const auto copies = segments_[entry.segment]->routing.copies_of(entry.entry);
    Queue* best = nullptr;
    int32_t best_position = 0;
    double best_finish = from.seconds();
    for (const int32_t position : copies) {
      Queue& to = queues_[drive_of(wanted, position)];
      if (&to == &from) continue;
      const double added = to.added(item_of(wanted, position));
      if (added > worth * saved || to.seconds() + added >= best_finish) continue;
      best = &to;
      best_position = position;
      best_finish = to.seconds() + added;
    }
    if (best == nullptr) return false;
    from.remove(index);
    best->insert(item_of(wanted, best_position));
    chosen_[wanted] = best_position;
    return true;
  }

  std::span<Segment* const> segments_;
  const WantedList& wanted_;
  std::vector<int32_t>& chosen_;
  std::span<Queue> queues_;
};

}  // namespace

void rebalance(std::span<Segment* const> segments, const WantedList& wanted,
               const DriveLoad& drives, std::vector<int32_t>& chosen) {
  const bool choice = std::any_of(segments.begin(), segments.end(), [](const Segment* segment) {
    return segment->copies() > segment->entries;
  });
  if (choice && drives.size() > 1) Rebalancer(segments, wanted, drives, chosen).run();
}

}  // namespace swarm_kv
