#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/budget.h"
#include "core/cluster_cache.h"
#include "core/coalesce.h"
#include "core/device_tier.h"
#include "core/drive_load.h"
#include "core/entry_pool.h"
#include "core/extent_allocator.h"
#include "core/fetch.h"
#include "core/segment.h"
#include "core/segment_writer.h"
#include "core/tier.h"
#include "core/traffic.h"
#include "io/open_device.h"

namespace swarm_kv {

struct StoreOptions {
  std::vector<io::DeviceOptions> drives;  // one per drive, in placement order
  bool shared_ring = true;
  uint64_t dram_bytes = 0;     // everything held in fast memory stays below it
  uint64_t staging_bytes = 0;  // the part of it that reads and writes go through
  uint64_t disk_bytes = 0;     // cap on what is stored, over all drives; 0: none
  std::string placement = "round_robin";
  std::string router = "swarm";
  std::string cache_policy = "decayed_frequency";
  bool verify = true;  // compare each entry read with its checksum
  // Seconds per request and per byte of every drive; zero: measured when the store opens.
  io::DeviceModel model{0, 0};
};

// Entries on several drives and the fast memory before them: segments are written once, fetched
// many times. All functions may be called by several threads; no lock is held across I/O. Handles
// (segments, tickets) are positive numbers that are not used again.
class Store {
 public:
  // Opens and measures the drives. Throws Error(kStorage) for a path that cannot be used and
  // Error(kCapacity) when `dram_bytes` does not hold the staging memory; nothing is left behind.
  explicit Store(const StoreOptions& options);
  // On drives that are open already; `options.drives` is not looked at.
  Store(const StoreOptions& options, std::vector<std::shared_ptr<io::BlockDevice>> drives);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // Refuses further calls and frees the drives; Error(kState) while fetches are outstanding.
  void close();

  // Fixes the size of an entry; a different size later is Error(kArgument).
  void set_entry_bytes(int64_t entry_bytes);
  std::shared_ptr<Region> region();

  // Charges (or with a negative number returns) index memory that the caller keeps.
  void charge_index(int64_t bytes);

  // Window: entries that stay in fast memory. One slot and reference per entry.
  std::vector<int64_t> append(const EntrySource& source, int64_t count);
  void retain(std::span<const int64_t> slots);
  void release(std::span<const int64_t> slots);

  // Writes `entries` entries in `clusters` to the drives, coded by the codec named; returns the
  // segment's handle. Writers take turns, everything else goes on meanwhile. With a profile, the
  // cluster cache begins with the entries that are worth most by it; they come from `source`
  // through the codec, not from the drives. `starts`: see place(). On an error nothing stays
  // allocated.
  int64_t write(const EntrySource& source, int64_t entries, Clusters clusters,
                const std::string& label, const InitialFill& fill = {},
                const std::string& codec = "none", std::span<const int32_t> starts = {});
  // The segment's space is reused once no fetch reads from it any more.
  void free_segment(int64_t segment);
  // What lies on the drives; not to be read from while fetches change its residency.
  std::shared_ptr<const Segment> segment(int64_t segment);

  // Starts reading what a step of a batch needs and returns its ticket at once; `resident` is set
  // to what is in fast memory already, and there until the ticket is released. What several rows
  // want, because they share segments, is read once.
  //
  // `ahead` is 0 or the ticket of a prefetch: what that has delivered or in flight is not read
  // again, and it becomes a part of the new ticket. Reads that it had no memory to start are as if
  // it had never wanted them. On an error it is left as it was.
  //
  // With `on_device`, which only a step on the store's device has, it is set to what the device's
  // cluster cache holds, by slots there, and that is left out elsewhere.
  int64_t submit(std::span<const Row> rows, Purpose purpose, int64_t ahead, Delivery& resident,
                 Delivery* on_device = nullptr);
  // Waits until a worthwhile part of a ticket's reads has arrived, in any order, and sets `arrived`
  // to its entries. True: another wait() brings further ones; the slots of this part are gone then.
  //
  // Entries whose read failed or whose checksum differs are read from another copy; without one the
  // ticket is released and Error(kStorage) names the drive, the segment and the entry. Staging
  // memory that fetches of other threads hold is waited for; Error(kCapacity) when this thread's
  // own hold it, or at the time-out: the ticket stays, and another wait() may succeed once they are
  // released. Error(kState) while another thread waits for the ticket.
  bool wait(int64_t ticket, Delivery& arrived);
  // Gives a ticket back at any time. Reads in flight are cancelled; while another thread waits for
  // the ticket, that thread ends it and gets Error(kState).
  void release_ticket(int64_t ticket);

  // Attention may run on `device` from now on, see step_on_device(), which keeps up to `hbm_bytes`
  // of entries. Takes a part of the staging memory. Error(kState) without a size of entries or for
  // a second device, Error(kCapacity) where memory for it is missing; then nothing has changed.
  void attach(std::shared_ptr<Device> device, uint64_t hbm_bytes);
  DeviceTier* device();  // null without
  // DeviceTier's functions of these names, under the lock.
  void keep_window(std::span<const int64_t> slots, std::vector<int64_t>& at,
                   std::vector<DeviceTier::Piece>& missing);
  void forget_window(std::span<const int64_t> slots);
  // Offers the device's cluster cache what a step has there beside it: entry i of the delivery at
  // slot `at[i]`, -1 for those that are elsewhere.
  void offer_to_device(std::span<const Row> rows, const Delivery& delivery,
                       std::span<const int64_t> at);

  // Everything countable, as one JSON object; byte and entry counts are totals since opening.
  std::string stats();
  std::vector<std::string> notes();

 private:
  struct Held {
    std::shared_ptr<Segment> segment;
    int64_t fetches = 0;
    bool doomed = false;
  };

  using Lock = std::unique_lock<std::mutex>;

  void check_open() const;
  void fix_entry_bytes(int64_t entry_bytes);
  Held& held(int64_t segment);
  void write_out(Segment& segment, const EntrySource& source);
  void allocate_extent(Segment& segment, size_t drive);
  void free_extents(const Segment& segment);
  void destroy_segment(int64_t id);

  // submit.cpp
  void name_segments(Fetch& fetch, std::span<const Row> rows);
  void touch(const Fetch& fetch);
  void take_kept_on_device(Fetch& fetch, WantedList& wanted);
  void take_cached(Fetch& fetch, WantedList& wanted);
  void ride(Fetch& fetch, std::unique_ptr<Fetch> ahead);
  uint64_t largest_read(const Fetch& fetch) const;
  uint64_t staged_bytes(const Fetch& fetch, const Read& read) const;
  bool prepare_round(Fetch& fetch, ReadRound& round);
  void start_round(Lock& lock, Fetch& fetch, ReadRound& round);

  // complete.cpp
  bool await_arena(Lock& lock, Fetch& fetch);
  void receive(Fetch& fetch, Fetch& due, std::span<const uint32_t> taken);
  bool intact(const Segment& segment, const Wanted& wanted, int error, const std::byte* data) const;
  bool repair(const Segment& segment, const Wanted& wanted, int32_t failed_position,
              std::byte* out) const;
  [[noreturn]] void fail(const Segment& segment, const Wanted& wanted, const Read& read,
                         int error) const;
  uint64_t refuge(ReadRound& round, uint64_t bytes, const Read& read);
  void account(Fetch& fetch, Fetch& due, std::span<const uint32_t> taken);

  // tickets.cpp
  std::vector<std::unique_ptr<Fetch>>::iterator find_ticket(int64_t id);
  Fetch& ticket(int64_t id);  // that no thread works on
  std::unique_ptr<Fetch> take_ticket(const Fetch& fetch);
  std::unique_ptr<Fetch> idle_fetch();
  void end(Lock& lock, Fetch& fetch);
  void cancel(Fetch& fetch);
  void give_back(std::unique_ptr<Fetch> fetch);
  void release_round(const Fetch& fetch, ReadRound& round);

  std::mutex mutex_;
  bool open_ = true;
  const StoreOptions options_;
  std::vector<std::shared_ptr<io::BlockDevice>> drives_;
  Budget budget_;
  EntryPool pool_;
  Arena write_arena_;     // reads can never starve a write
  bool writing_ = false;  // a thread uses it, and turn_; others wait
  std::condition_variable written_;
  Arena arena_;                  // reads
  uint64_t prefetch_bytes_ = 0;  // of it, held by what was read ahead
  std::shared_ptr<LateRanges> late_ranges_ = std::make_shared<LateRanges>();
  std::vector<ArenaRange> came_back_;
  std::condition_variable arena_released_;
  ClusterCache cache_;
  std::unique_ptr<DeviceTier> device_;
  std::unique_ptr<Router> router_;
  std::vector<DriveShape> shapes_;
  DriveLoad load_;
  std::vector<ExtentAllocator> extents_;
  Turn turn_;
  int64_t next_handle_ = 1;
  std::map<int64_t, Held> segments_;
  std::vector<std::unique_ptr<Fetch>> tickets_;  // ascending
  std::vector<std::unique_ptr<Fetch>> idle_;     // fetches to use again
  int64_t ending_ = 0;                           // fetches that give their memory back
  uint64_t charged_index_ = 0;
  Traffic traffic_;
};

}  // namespace swarm_kv
