#include "core/store.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "core/stats_json.h"
#include "io/error.h"

namespace swarm_kv {
namespace {

constexpr uint64_t kProbeBytes = 4 << 20;

void check_options(const StoreOptions& options, size_t drives) {
  if (drives == 0) {
    throw Error(ErrorKind::kArgument, "a store needs at least one path, got none");
  }
  if (drives > kMaxDrives) {
    throw Error(ErrorKind::kArgument, "a store takes at most " + std::to_string(kMaxDrives) +
                                          " paths, got " + std::to_string(drives) +
                                          ": join drives below it, or open several stores");
  }
  // Two write buffers per drive, and as much again for reads.
  const uint64_t least_staging = 4 * drives * Arena::kGranule;
  if (options.staging_bytes < least_staging) {
    throw Error(ErrorKind::kArgument, "`staging_bytes` (" + std::to_string(options.staging_bytes) +
                                          ") is below its minimum of " +
                                          std::to_string(least_staging) + " for " +
                                          std::to_string(drives) + " drives");
  }
  make_router(options.router);
  make_cache_policy(options.cache_policy);
  const auto placements = placement_names();
  if (std::find(placements.begin(), placements.end(), options.placement) == placements.end()) {
    Turn unused;
    place(Clusters{}, std::vector<double>{1}, options.placement, unused);  // lists the names
  }
}

// A quarter of the staging memory, and at least a granule for each of two buffers per drive.
uint64_t write_share(uint64_t staging_bytes, size_t drives) {
  return std::max<uint64_t>(staging_bytes / 4, 2 * drives * Arena::kGranule);
}

const StoreOptions& checked(const StoreOptions& options, size_t drives) {
  check_options(options, drives);
  return options;
}

io::DeviceModel model_of(io::BlockDevice& drive, const io::DeviceModel& given) {
  if (given.t_base > 0 && given.t_transfer > 0) return given;
  drive.reserve(std::max(drive.capacity(), kProbeBytes));
  return io::measure_device(drive);
}

std::vector<DriveShape> shapes_of(const std::vector<std::shared_ptr<io::BlockDevice>>& drives,
                                  const io::DeviceModel& given) {
  std::vector<DriveShape> shapes;
  for (const auto& drive : drives) {
    shapes.push_back({model_of(*drive, given), drive->geometry().block});
  }
  return shapes;
}

}  // namespace

Store::Store(const StoreOptions& options)
    : Store(checked(options, options.drives.size()),
            io::open_devices(options.drives, options.shared_ring)) {}

Store::Store(const StoreOptions& options, std::vector<std::shared_ptr<io::BlockDevice>> drives)
    : options_(checked(options, drives.size())),
      drives_(std::move(drives)),
      budget_(options_.dram_bytes),
      pool_(options_.staging_bytes, options_.dram_bytes, options_.dram_bytes, budget_),
      write_arena_(write_share(options_.staging_bytes, drives_.size())),
      arena_(options_.staging_bytes - write_arena_.size(), write_arena_.size()),
      cache_(pool_, budget_, options_.cache_policy, shapes_),
      router_(make_router(options_.router)),
      shapes_(shapes_of(drives_, options_.model)),
      load_(shapes_) {
  const uint64_t per_drive = (options_.disk_bytes + drives_.size() - 1) / drives_.size();
  for (const auto& drive : drives_) extents_.emplace_back(drive, per_drive);
  for (auto& count : traffic_.by_purpose) {
    count.drive_requests.resize(drives_.size());
    count.drive_bytes.resize(drives_.size());
  }
  const std::span<std::byte> staging(pool_.region()->data(), write_arena_.size() + arena_.size());
  for (const auto& drive : drives_) drive->register_buffer(staging);
}

Store::~Store() {
  // What is in flight ends before the memory that it fills goes away, or keeps that memory.
  for (const auto& fetch : tickets_) {
    for (Fetch* each = fetch.get(); each != nullptr; each = each->ahead.get()) cancel(*each);
  }
  const std::span<std::byte> staging(pool_.region()->data(), write_arena_.size() + arena_.size());
  for (const auto& drive : drives_) drive->unregister_buffer(staging);
}

void Store::close() {
  const std::lock_guard lock(mutex_);
  check_open();
  if (!tickets_.empty()) {
    throw Error(ErrorKind::kState, "the store cannot close: " + std::to_string(tickets_.size()) +
                                       " fetches are outstanding; wait for and release them first");
  }
  if (writing_)
    throw Error(ErrorKind::kState, "the store cannot close: a segment is being written");
  open_ = false;
}

void Store::check_open() const {
  if (!open_) throw Error(ErrorKind::kState, "the store is closed: open another one");
}

Store::Held& Store::held(int64_t segment) {
  const auto found = segments_.find(segment);
  if (found == segments_.end() || found->second.doomed) {
    throw Error(ErrorKind::kState,
                "segment " + std::to_string(segment) + " does not exist or was freed");
  }
  return found->second;
}

void Store::set_entry_bytes(int64_t entry_bytes) {
  const std::lock_guard lock(mutex_);
  check_open();
  fix_entry_bytes(entry_bytes);
}

void Store::fix_entry_bytes(int64_t entry_bytes) {
  // Twice an entry in whatever form it is stored, and as it is attended to.
  if (entry_bytes > 0 &&
      4 * (static_cast<uint64_t>(entry_bytes) + Arena::kGranule) > arena_.size()) {
    throw Error(ErrorKind::kArgument, "`staging_bytes` (" + std::to_string(options_.staging_bytes) +
                                          ") does not hold two entries of " +
                                          std::to_string(entry_bytes) + " bytes");
  }
  pool_.set_entry_bytes(entry_bytes);
}

std::shared_ptr<Region> Store::region() { return pool_.region(); }

void Store::charge_index(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (bytes >= 0) {
    check_open();
    budget_.reserve(Use::kIndex, bytes);
    charged_index_ += bytes;
  } else {
    const uint64_t returned = std::min(charged_index_, static_cast<uint64_t>(-bytes));
    charged_index_ -= returned;
    budget_.release(Use::kIndex, returned);
  }
}

std::vector<int64_t> Store::append(const EntrySource& source, int64_t count) {
  const std::lock_guard lock(mutex_);
  check_open();
  fix_entry_bytes(source.entry_bytes());
  std::vector<int64_t> slots = pool_.allocate(count);
  for (int64_t n = 0; n < count; ++n) source.assemble(n, pool_.at(slots[n]));
  return slots;
}

void Store::retain(std::span<const int64_t> slots) {
  const std::lock_guard lock(mutex_);
  pool_.retain(slots);
}

void Store::release(std::span<const int64_t> slots) {
  const std::lock_guard lock(mutex_);
  pool_.release(slots);
  if (!device_) return;
  std::vector<int64_t> gone;
  std::ranges::copy_if(slots, std::back_inserter(gone),
                       [&](int64_t slot) { return !pool_.allocated(slot); });
  device_->forget_window(gone);
}

void Store::allocate_extent(Segment& segment, size_t drive) {
  ExtentAllocator& extents = extents_[drive];
  const uint64_t bytes = segment.drive_bytes(drive);
  Lock lock(mutex_);
  if (const auto capacity = extents.shortage(bytes)) {
    lock.unlock();
    extents.grow(*capacity);
    lock.lock();
  }
  segment.drive_offset.push_back(extents.allocate(bytes));
}

// Those that were allocated.
void Store::free_extents(const Segment& segment) {
  for (size_t drive = 0; drive < segment.drive_offset.size(); ++drive) {
    extents_[drive].release(segment.drive_offset[drive], segment.drive_bytes(drive));
  }
}

int64_t Store::write(const EntrySource& source, int64_t entries, Clusters clusters,
                     const std::string& label, const InitialFill& fill,
                     const std::string& codec_name, std::span<const int32_t> starts) {
  const auto score = make_tier_score(fill.score);
  if (score) fill.check(entries);
  int64_t id = 0;
  {
    Lock lock(mutex_);
    check_open();
    fix_entry_bytes(source.entry_bytes());
    written_.wait(lock, [&] { return !writing_; });
    check_open();
    writing_ = true;
    id = next_handle_++;
  }
  const auto end_turn = [](Store* store) {
    const std::lock_guard lock(store->mutex_);
    store->writing_ = false;
    store->written_.notify_one();
  };
  const std::unique_ptr<Store, decltype(end_turn)> my_turn(this, end_turn);

  std::unique_ptr<Codec> codec = make_codec(codec_name, source, entries);
  const int64_t stored_bytes = codec ? codec->stored_bytes() : source.entry_bytes();
  Turn turn = turn_;
  Placement placement =
      place(clusters, speeds(shapes_, stored_bytes), options_.placement, turn, starts);
  RoutingTable routing(clusters, entries);
  auto segment = std::make_shared<Segment>(Segment{.id = id,
                                                   .label = label,
                                                   .entries = entries,
                                                   .entry_bytes = stored_bytes,
                                                   .codec = std::move(codec),
                                                   .clusters = std::move(clusters),
                                                   .placement = std::move(placement),
                                                   .routing = std::move(routing),
                                                   .drive_offset = {},
                                                   .checksum = {},
                                                   .residency = {}});
  segment->checksum.resize(entries);
  cache_.prepare(*segment);
  if (device_) device_->cache().prepare(*segment);
  write_out(*segment, source);

  const std::lock_guard lock(mutex_);
  turn_ = std::move(turn);
  ++traffic_.segments_written;
  traffic_.written_bytes += segment->stored_bytes();
  traffic_.stored_bytes += segment->stored_bytes();
  traffic_.stored_entries += entries;
  traffic_.stored_copies += segment->copies();
  cache_.add(*segment);
  if (device_) device_->cache().add(*segment);
  if (score) {
    std::vector<std::byte> code(segment->codec ? stored_bytes : 0);
    cache_.fill(*segment, fill.activations, fill.queries,
                tier_order(*segment, fill.activations, shapes_, *score),
                [&](int32_t entry, int64_t slot) {
                  std::byte* const out = pool_.at(slot);
                  source.assemble(entry, out);
                  if (!segment->codec) return;
                  // As if it had been read: what is attended to must not depend on what is cached.
                  segment->codec->encode(out, code.data());
                  segment->codec->decode(code.data(), out);
                });
  }
  segments_[id].segment = std::move(segment);
  return id;
}

// Reserves memory and space for a segment and writes it; on an error nothing stays allocated.
void Store::write_out(Segment& segment, const EntrySource& source) {
  {
    const std::lock_guard lock(mutex_);
    budget_.reserve(Use::kIndex, segment.index_bytes());
  }
  try {
    for (size_t drive = 0; drive < drives_.size(); ++drive) allocate_extent(segment, drive);
    write_segment(segment, source, drives_, write_arena_, pool_.region());
  } catch (...) {
    const std::lock_guard lock(mutex_);
    free_extents(segment);
    budget_.release(Use::kIndex, segment.index_bytes());
    throw;
  }
}

void Store::destroy_segment(int64_t id) {
  const auto found = segments_.find(id);
  Segment& segment = *found->second.segment;
  cache_.remove(segment);
  if (device_) device_->cache().remove(segment);
  free_extents(segment);
  budget_.release(Use::kIndex, segment.index_bytes());
  traffic_.stored_bytes -= segment.stored_bytes();
  traffic_.stored_entries -= segment.entries;
  traffic_.stored_copies -= segment.copies();
  segments_.erase(found);
}

void Store::free_segment(int64_t segment) {
  const std::lock_guard lock(mutex_);
  Held& record = held(segment);
  if (record.fetches > 0) {
    record.doomed = true;
  } else {
    destroy_segment(segment);
  }
}

std::shared_ptr<const Segment> Store::segment(int64_t segment) {
  const std::lock_guard lock(mutex_);
  return held(segment).segment;
}

std::string Store::stats() {
  const std::lock_guard lock(mutex_);
  Holdings holdings{0, tickets_.size(), arena_.used()};
  for (const ExtentAllocator& extents : extents_) holdings.allocated_bytes += extents.used();
  return stats_json(traffic_, budget_, pool_, cache_, holdings, device_.get(), drives_, shapes_,
                    load_);
}

std::vector<std::string> Store::notes() {
  std::vector<std::string> notes;
  for (const auto& drive : drives_) {
    for (const std::string& note : drive->notes()) notes.push_back(drive->name() + ": " + note);
  }
  return notes;
}

}  // namespace swarm_kv
