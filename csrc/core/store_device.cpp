// What a store keeps on a device.
#include "core/store.h"
#include "io/error.h"

namespace swarm_kv {

void Store::attach(std::shared_ptr<Device> device, uint64_t hbm_bytes) {
  Lock lock(mutex_);
  written_.wait(lock, [&] { return !writing_; });  // a segment is either known here or to come
  check_open();
  if (device_) throw Error(ErrorKind::kState, "the store has a device already");
  const int64_t entry_bytes = pool_.entry_bytes();
  if (entry_bytes == 0) {
    throw Error(ErrorKind::kState, "a store gets its device once the size of its entries is fixed");
  }
  const uint64_t bytes = DeviceTier::bounce_bytes(arena_.size(), entry_bytes);
  const auto bounce = arena_.allocate(bytes);
  if (!bounce) {
    throw Error(ErrorKind::kCapacity, "the staging arena has no room for " + std::to_string(bytes) +
                                          " bytes that copies to the device go through: release "
                                          "fetches, or raise `staging_bytes`");
  }
  std::unique_ptr<DeviceTier> tier;
  uint64_t reserved = 0;
  try {
    const auto staging = static_cast<int64_t>(write_arena_.size() + arena_.size());
    tier = std::make_unique<DeviceTier>(std::move(device), pool_.region(),
                                        ArenaRange{*bounce, bytes}, staging, entry_bytes, hbm_bytes,
                                        options_.cache_policy, shapes_);
    for (auto& [id, held] : segments_) {
      tier->cache().prepare(*held.segment);
      budget_.reserve(Use::kIndex, held.segment->on_device.bytes());
      reserved += held.segment->on_device.bytes();
    }
  } catch (...) {
    for (auto& [id, held] : segments_) held.segment->on_device = {};
    budget_.release(Use::kIndex, reserved);
    arena_.release(*bounce, bytes);
    throw;
  }
  for (auto& [id, held] : segments_) tier->cache().add(*held.segment);
  device_ = std::move(tier);
}

DeviceTier* Store::device() {
  const std::lock_guard lock(mutex_);
  return device_.get();
}

void Store::keep_window(std::span<const int64_t> slots, std::vector<int64_t>& at,
                        std::vector<DeviceTier::Piece>& missing) {
  const std::lock_guard lock(mutex_);
  device_->keep_window(slots, at, missing);
}

void Store::forget_window(std::span<const int64_t> slots) {
  const std::lock_guard lock(mutex_);
  device_->forget_window(slots);
}

void Store::offer_to_device(std::span<const Row> rows, const Delivery& delivery,
                            std::span<const int64_t> at) {
  const std::lock_guard lock(mutex_);
  if (device_->budget().limit() == 0) return;
  std::vector<ClusterCache::Offer> offers;
  std::vector<Segment*> segments;
  for (size_t r = 0; r < rows.size(); ++r) {
    segments.clear();
    for (const int64_t id : rows[r].segments) segments.push_back(held(id).segment.get());
    for (int64_t i = delivery.rows[r]; i < delivery.rows[r + 1]; ++i) {
      if (at[i] < 0) continue;
      int64_t entry = delivery.ids[i];
      auto segment = segments.begin();
      for (; entry >= (*segment)->entries; ++segment) entry -= (*segment)->entries;
      offers.push_back({(*segment)->id, static_cast<int32_t>(entry), at[i]});
    }
  }
  device_->cache().admit(offers, [this](int64_t id) -> Segment& { return *held(id).segment; });
}

}  // namespace swarm_kv
