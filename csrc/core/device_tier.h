#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/arena.h"
#include "core/budget.h"
#include "core/cluster_cache.h"
#include "core/device.h"
#include "core/entry_pool.h"
#include "core/read_round.h"

namespace swarm_kv {

// What of a store lies on a device, which attends in the host's stead.
//
//   [ batch | batch | kept: cluster cache ->  <- window ]
//
// Entries that a step needs and that are not kept there come in batches, two of which take turns:
// while one is attended to, the next is copied. On the host a batch goes through `bounce` memory of
// its size, but for long runs in pinned memory, which are copied from where they lie.
//
// What is kept are the sequences' own entries (sinks and window, by their window slots of the pool)
// and, in the rest of `hbm_bytes`, a cluster cache.
class DeviceTier {
 public:
  // Takes the memory that it needs of `device`. `bounce` is a range of the region, `pinned` how
  // many of its first bytes are staging memory, which may be pinned.
  DeviceTier(std::shared_ptr<Device> device, std::shared_ptr<Region> region, ArenaRange bounce,
             int64_t pinned, int64_t entry_bytes, uint64_t hbm_bytes, const std::string& policy,
             const std::vector<DriveShape>& drives);

  // Marks of the device: two of each of the first, one for each batch.
  enum : int { kCopied, kRead = 2, kEnd = 4, kMoved };

  // Bytes of bounce memory, of a read arena of so many.
  static uint64_t bounce_bytes(uint64_t arena_bytes, int64_t entry_bytes);

  int ordinal() const { return device_->ordinal(); }
  std::byte* memory() const { return device_->memory(); }
  int64_t size() const { return kept_begin_ + static_cast<int64_t>(budget_.limit()); }

  // ---- What is kept: under the store's lock.

  ClusterCache& cache() { return cache_; }
  const ClusterCache& cache() const { return cache_; }
  const Budget& budget() const { return budget_; }
  int64_t window_entries() const { return static_cast<int64_t>(window_.size()); }
  void count_hit() { ++hits_; }
  uint64_t hits() const { return hits_; }

  struct Piece {
    int64_t from;  // slot in the pool
    int64_t to;    // slot on the device
  };
  // Sets `at` to where the device keeps each of the pool's window slots, or -1. Those that were not
  // kept yet and have room are kept from now on, and appended to `missing`, to be loaded. The
  // cluster cache makes room, so what it holds is looked up afterwards.
  void keep_window(std::span<const int64_t> slots, std::vector<int64_t>& at,
                   std::vector<Piece>& missing);
  // The pool gave these slots back.
  void forget_window(std::span<const int64_t> slots);

  // ---- Steps: one at a time.

  // Held by a step from its beginning to its end.
  std::mutex& turn() { return turn_; }

  // Throws as Device::begin does.
  void begin();
  // Entries of a batch at most.
  int64_t capacity() const { return capacity_; }
  // Slot on the device of entry `i` of the next batch.
  int64_t batch_slot(int64_t i) const { return (batch_ * capacity_ + i) * entry_bytes_; }
  // Brings the pieces, at most `capacity`, in ascending order of `from`; what is computed from now
  // on finds them.
  void load(std::span<const Piece> pieces);
  // All that reads the batch which was loaded last has been enqueued.
  void done();
  // Waits until no copy reads from the pool any more.
  void settle();
  void end();

 private:
  // The kept part, as the cluster cache sees it.
  class Kept : public CacheMemory {
   public:
    Kept(Device& device, int64_t begin, int64_t bytes, int64_t entry_bytes)
        : CacheMemory(begin, bytes), device_(device) {
      entry_bytes_ = entry_bytes;
    }
    void copy(int64_t to, int64_t from) const override { device_.move(to, from, entry_bytes_); }
    void discard_cache(int64_t, int64_t) const override {}

   private:
    Device& device_;
  };

  int64_t window_slot(int64_t index) const { return kept_end_ - (index + 1) * entry_bytes_; }
  bool grow_window();
  void upload(int64_t to, int64_t from, int64_t bytes);

  const std::shared_ptr<Device> device_;
  const std::shared_ptr<Region> region_;
  const ArenaRange bounce_;
  const int64_t pinned_;
  const int64_t entry_bytes_;
  const int64_t capacity_;
  const int64_t kept_begin_;
  const int64_t kept_end_;  // of whole entries

  Budget budget_;
  Kept kept_;
  ClusterCache cache_;
  std::unordered_map<int64_t, int64_t> window_;  // slot in the pool -> number of its place
  std::vector<int64_t> free_window_;             // numbers without an entry
  int64_t window_places_ = 0;
  uint64_t hits_ = 0;

  std::mutex turn_;
  int batch_ = 0;                 // the next one
  bool loaded_ = false;           // and it may be read
  std::array<bool, 2> direct_{};  // whether copies of it read from the pool
};

}  // namespace swarm_kv
