#include "core/device_tier.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace swarm_kv {
namespace {

// Runs in pinned memory from this length on are copied from where they lie: below it, enqueuing a
// copy takes the host longer than copying the bytes to where one copy takes many of them.
constexpr int64_t kDirectBytes = 32 << 10;
// Memory is pinned in chunks of so many bytes (swarm_kv/pinned.py), and CUDA refuses a copy that
// begins in one and ends in another.
constexpr int64_t kPinnedChunk = 64 << 20;
// Places for window entries are taken from the budget in steps.
constexpr int64_t kGrowthPlaces = 64;

}  // namespace

uint64_t DeviceTier::bounce_bytes(uint64_t arena_bytes, int64_t entry_bytes) {
  return 2 * Arena::rounded(std::max<uint64_t>(arena_bytes / 8, entry_bytes));
}

DeviceTier::DeviceTier(std::shared_ptr<Device> device, std::shared_ptr<Region> region,
                       ArenaRange bounce, int64_t pinned, int64_t entry_bytes, uint64_t hbm_bytes,
                       const std::string& policy, const std::vector<DriveShape>& drives)
    : device_(std::move(device)),
      region_(std::move(region)),
      bounce_(bounce),
      pinned_(pinned),
      entry_bytes_(entry_bytes),
      capacity_(static_cast<int64_t>(bounce.bytes) / 2 / entry_bytes),
      kept_begin_(2 * capacity_ * entry_bytes),
      kept_end_(kept_begin_ + static_cast<int64_t>(hbm_bytes) / entry_bytes * entry_bytes),
      budget_(hbm_bytes),
      kept_(*device_, kept_begin_, kept_end_ - kept_begin_, entry_bytes),
      cache_(kept_, budget_, policy, drives, &Segment::on_device) {
  device_->allocate(size());
}

void DeviceTier::keep_window(std::span<const int64_t> slots, std::vector<int64_t>& at,
                             std::vector<Piece>& missing) {
  at.clear();
  for (const int64_t slot : slots) {
    const auto found = window_.find(slot);
    if (found != window_.end()) {
      at.push_back(window_slot(found->second));
    } else if (!free_window_.empty() || grow_window()) {
      const int64_t number = free_window_.back();
      free_window_.pop_back();
      window_.emplace(slot, number);
      at.push_back(window_slot(number));
      missing.push_back({slot, at.back()});
    } else {
      at.push_back(-1);
    }
  }
}

bool DeviceTier::grow_window() {
  const int64_t room =
      static_cast<int64_t>(budget_.limit() - budget_.used(Use::kWindow)) / entry_bytes_;
  const int64_t more = std::min(kGrowthPlaces, room);
  if (more == 0) return false;
  budget_.reserve(Use::kWindow, more * entry_bytes_);
  window_places_ += more;
  for (int64_t i = 1; i <= more; ++i) free_window_.push_back(window_places_ - i);
  return true;
}

void DeviceTier::forget_window(std::span<const int64_t> slots) {
  for (const int64_t slot : slots) {
    const auto found = window_.find(slot);
    if (found == window_.end()) continue;
    free_window_.push_back(found->second);
    window_.erase(found);
  }
}

void DeviceTier::begin() {
  device_->begin();
  device_->follow(kEnd, Device::kCompute);  // the last step may have computed elsewhere
}

void DeviceTier::load(std::span<const Piece> pieces) {
  // What was copied through this bounce memory must have left it, what lies in the batch must have
  // been read, and what the cluster cache moves must have moved before its place gets another.
  loaded_ = true;
  device_->await(kCopied + batch_);
  device_->follow(kRead + batch_, Device::kCopy);
  device_->record(kMoved, Device::kCompute);
  if (!pieces.empty() && pieces.front().to >= kept_begin_) device_->follow(kMoved, Device::kCopy);

  const int64_t bounce = static_cast<int64_t>(bounce_.offset) + batch_ * capacity_ * entry_bytes_;
  int64_t filled = 0;   // of the bounce memory
  int64_t to = 0;       // where what lies there and was not sent yet shall go
  int64_t pending = 0;  // its length
  const auto send = [&] {
    if (pending > 0) upload(to, bounce + filled - pending, pending);
    pending = 0;
  };
  for (size_t i = 0; i < pieces.size();) {
    const Piece& first = pieces[i];
    int64_t bytes = 0;
    while (i < pieces.size() && pieces[i].from == first.from + bytes &&
           pieces[i].to == first.to + bytes) {
      bytes += entry_bytes_;
      ++i;
    }
    if (bytes >= kDirectBytes && first.from + bytes <= pinned_) {
      upload(first.to, first.from, bytes);
      direct_[batch_] = true;
      continue;
    }
    if (first.to != to + pending) {
      send();
      to = first.to;
    }
    std::memcpy(region_->data() + bounce + filled, region_->data() + first.from, bytes);
    filled += bytes;
    pending += bytes;
  }
  send();
  device_->record(kCopied + batch_, Device::kCopy);
  device_->follow(kCopied + batch_, Device::kCompute);
}

// From the pool.
void DeviceTier::upload(int64_t to, int64_t from, int64_t bytes) {
  while (bytes > 0) {
    const int64_t part = std::min(bytes, kPinnedChunk - from % kPinnedChunk);
    device_->upload(to, region_->data() + from, part);
    to += part;
    from += part;
    bytes -= part;
  }
}

void DeviceTier::done() {
  device_->record(kRead + batch_, Device::kCompute);
  batch_ = 1 - batch_;
  loaded_ = false;
}

void DeviceTier::settle() {
  for (int batch = 0; batch < 2; ++batch) {
    if (std::exchange(direct_[batch], false)) device_->await(kCopied + batch);
  }
}

void DeviceTier::end() {
  settle();
  if (loaded_) done();  // the step has failed in between
  device_->record(kEnd, Device::kCompute);
}

}  // namespace swarm_kv
