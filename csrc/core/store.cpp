#include "core/store.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "core/stats_json.h"
#include "io/error.h"

namespace swarm_kv {
namespace {

constexpr uint64_t kMaxRead = 1 << 20;
constexpr uint64_t kProbeBytes = 4 << 20;

void check_options(const StoreOptions& options, size_t drives) {
  if (drives == 0) {
    throw Error(ErrorKind::kArgument, "a store needs at least one path, got none");
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
    int64_t unused = 0;
    place(Clusters{}, 1, 1, options.placement, unused);  // throws, listing the names
  }
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

}  // namespace

Store::Store(const StoreOptions& options)
    : Store(checked(options, options.drives.size()),
            io::open_devices(options.drives, options.shared_ring)) {}

Store::Store(const StoreOptions& options, std::vector<std::shared_ptr<io::BlockDevice>> drives)
    : options_(checked(options, drives.size())),
      drives_(std::move(drives)),
      budget_(options_.dram_bytes),
      pool_(options_.staging_bytes, options_.dram_bytes, options_.dram_bytes, budget_),
      arena_(options_.staging_bytes),
      cache_(pool_, budget_, make_cache_policy(options_.cache_policy)),
      router_(make_router(options_.router)) {
  const uint64_t per_drive = (options_.disk_bytes + drives_.size() - 1) / drives_.size();
  for (const auto& drive : drives_) {
    extents_.emplace_back(drive, per_drive);
    shapes_.push_back({model_of(*drive, options_.model), drive->geometry().block});
  }
  for (auto& count : traffic_.by_purpose) {
    count.drive_requests.resize(drives_.size());
    count.drive_bytes.resize(drives_.size());
  }
  const std::span<std::byte> staging(pool_.region()->data(), arena_.size());
  for (const auto& drive : drives_) drive->register_buffer(staging);
}

Store::~Store() {
  // Batches in flight are waited for before the memory that they fill goes away.
  for (auto& [id, fetch] : tickets_) {
    fetch->in_flight.reset();
    fetch->delivered.reset();
  }
  const std::span<std::byte> staging(pool_.region()->data(), arena_.size());
  for (const auto& drive : drives_) drive->unregister_buffer(staging);
}

void Store::close() {
  const std::lock_guard lock(mutex_);
  check_open();
  if (!tickets_.empty()) {
    throw Error(ErrorKind::kState, "the store cannot close: " + std::to_string(tickets_.size()) +
                                       " fetches are outstanding; wait for and release them first");
  }
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

Fetch& Store::ticket(int64_t ticket) {
  const auto found = tickets_.find(ticket);
  if (found == tickets_.end()) {
    throw Error(ErrorKind::kState, "ticket " + std::to_string(ticket) +
                                       " does not exist: it was released, or its fetch failed");
  }
  if (found->second->waiting) {
    throw Error(ErrorKind::kState,
                "ticket " + std::to_string(ticket) + " is being waited for by another thread");
  }
  return *found->second;
}

void Store::set_entry_bytes(int64_t entry_bytes) {
  const std::lock_guard lock(mutex_);
  check_open();
  fix_entry_bytes(entry_bytes);
}

void Store::fix_entry_bytes(int64_t entry_bytes) {
  if (entry_bytes > 0 &&
      2 * (static_cast<uint64_t>(entry_bytes) + 2 * Arena::kGranule) > options_.staging_bytes) {
    throw Error(ErrorKind::kArgument, "`staging_bytes` (" + std::to_string(options_.staging_bytes) +
                                          ") does not hold two entries of " +
                                          std::to_string(entry_bytes) + " bytes");
  }
  pool_.set_entry_bytes(entry_bytes);
}

int64_t Store::entry_bytes() {
  const std::lock_guard lock(mutex_);
  return pool_.entry_bytes();
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
}

void Store::free_extents(const Segment& segment, size_t drives) {
  for (size_t drive = 0; drive < drives; ++drive) {
    extents_[drive].release(segment.drive_offset[drive], segment.placement.drive_bytes[drive]);
  }
}

int64_t Store::write(const EntrySource& source, int64_t entries, Clusters clusters,
                     const std::string& label) {
  const std::lock_guard lock(mutex_);
  check_open();
  fix_entry_bytes(source.entry_bytes());
  int64_t placed = placed_;
  Placement placement = place(clusters, source.entry_bytes(), static_cast<int64_t>(drives_.size()),
                              options_.placement, placed);
  RoutingTable routing(clusters, placement, entries);
  auto segment = std::make_shared<Segment>(Segment{.id = next_handle_,
                                                   .label = label,
                                                   .entries = entries,
                                                   .entry_bytes = source.entry_bytes(),
                                                   .clusters = std::move(clusters),
                                                   .placement = std::move(placement),
                                                   .routing = std::move(routing),
                                                   .drive_offset = {},
                                                   .checksum = {},
                                                   .residency = {}});
  segment->checksum.resize(entries);
  segment->residency.slot.assign(entries, -1);
  segment->residency.heat.assign(entries, 0.0f);
  segment->residency.pinned.assign(entries, 0);

  budget_.reserve(Use::kIndex, segment->index_bytes());
  size_t allocated = 0;
  try {
    for (size_t drive = 0; drive < drives_.size(); ++drive) {
      segment->drive_offset.push_back(
          extents_[drive].allocate(segment->placement.drive_bytes[drive]));
      ++allocated;
    }
    write_segment(*segment, source, drives_, arena_, pool_.region());
  } catch (...) {
    free_extents(*segment, allocated);
    budget_.release(Use::kIndex, segment->index_bytes());
    throw;
  }
  placed_ = placed;
  ++next_handle_;
  ++traffic_.segments_written;
  traffic_.written_bytes += segment->stored_bytes();
  traffic_.stored_bytes += segment->stored_bytes();
  traffic_.stored_entries += entries;
  cache_.add(*segment);
  const int64_t id = segment->id;
  segments_[id].segment = std::move(segment);
  return id;
}

void Store::destroy_segment(int64_t id) {
  const auto found = segments_.find(id);
  Segment& segment = *found->second.segment;
  cache_.remove(segment);
  free_extents(segment, drives_.size());
  budget_.release(Use::kIndex, segment.index_bytes());
  traffic_.stored_bytes -= segment.stored_bytes();
  traffic_.stored_entries -= segment.entries;
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

Clusters Store::clusters_of(int64_t segment) {
  const std::lock_guard lock(mutex_);
  return held(segment).segment->clusters;
}

void Store::read_copy(int64_t segment_id, int64_t member_position, std::byte* out) {
  const std::lock_guard lock(mutex_);
  check_open();
  const Segment& segment = *held(segment_id).segment;
  const auto copies = static_cast<int64_t>(segment.placement.copies.size());
  if (member_position < 0 || member_position >= copies) {
    throw Error(ErrorKind::kArgument, "member position " + std::to_string(member_position) +
                                          " is outside [0, " + std::to_string(copies) + ")");
  }
  const int32_t drive = segment.placement.copies[member_position].drive;
  drives_[drive]->read(segment.offset_of(member_position),
                       {out, static_cast<size_t>(segment.entry_bytes)});
}

Store::Submitted Store::submit(std::span<const int64_t> segments, std::span<const int64_t> clusters,
                               std::span<const int64_t> entries, int64_t limit, Purpose purpose) {
  const std::lock_guard lock(mutex_);
  check_open();
  auto fetch = std::make_unique<Fetch>();
  fetch->purpose = purpose;
  for (const int64_t id : segments) {
    fetch->segment_ids.push_back(id);
    fetch->segments.push_back(held(id).segment);
  }
  const auto pointers = fetch->segment_pointers();
  const WantedList all = dedupe({pointers, clusters, entries, limit});

  Submitted submitted{next_handle_, {}};
  Traffic::Count& count = traffic_.of(purpose);
  ++count.fetches;
  count.wanted += all.entries.size();
  if (purpose == Purpose::kDecode) {
    std::vector<int32_t> activated;
    for (size_t begin = 0; begin < all.entries.size();) {
      const int32_t segment = all.entries[begin].segment;
      activated.clear();
      while (begin < all.entries.size() && all.entries[begin].segment == segment) {
        activated.push_back(all.entries[begin++].entry);
      }
      cache_.touch(*pointers[segment], activated);
    }
  }
  for (const Wanted& wanted : all.entries) {
    Segment& segment = *pointers[wanted.segment];
    const int64_t slot = cache_.find(segment, wanted.entry);
    if (slot >= 0) {
      ++count.hits;
      cache_.pin(segment, wanted.entry);
      fetch->pinned.emplace_back(wanted.segment, wanted.entry);
      submitted.resident.ids.push_back(wanted.id);
      submitted.resident.slots.push_back(slot);
      continue;
    }
    Wanted missing = wanted;
    missing.first_candidate = static_cast<int32_t>(fetch->wanted.candidates.size());
    const auto first = all.candidates.begin() + wanted.first_candidate;
    fetch->wanted.candidates.insert(fetch->wanted.candidates.end(), first,
                                    first + wanted.candidates);
    fetch->wanted.entries.push_back(missing);
  }
  std::vector<io::DeviceModel> models;
  for (const DriveShape& shape : shapes_) models.push_back(shape.model);
  fetch->chosen = router_->route(pointers, fetch->wanted, models);
  fetch->pieces.reserve(fetch->chosen.size());
  for (size_t i = 0; i < fetch->chosen.size(); ++i) {
    const Segment& segment = *pointers[fetch->wanted.entries[i].segment];
    fetch->pieces.push_back({segment.placement.copies[fetch->chosen[i]].drive,
                             segment.offset_of(fetch->chosen[i]),
                             static_cast<uint64_t>(segment.entry_bytes), static_cast<int32_t>(i)});
  }
  const uint64_t largest = std::max<uint64_t>(pool_.entry_bytes() + 2 * Arena::kGranule,
                                              std::min<uint64_t>(kMaxRead, arena_.size() / 8));
  fetch->reads = coalesce(fetch->pieces, shapes_, largest);
  for (const Read& read : fetch->reads) {
    ++count.requests;
    count.bytes += read.length;
    ++count.drive_requests[read.drive];
    count.drive_bytes[read.drive] += read.length;
  }
  try {
    start_round(*fetch);
  } catch (...) {
    for (const auto& [segment, entry] : fetch->pinned) cache_.unpin(*pointers[segment], entry);
    throw;
  }
  for (const int64_t id : segments) ++held(id).fetches;
  tickets_[next_handle_++] = std::move(fetch);
  return submitted;
}

// Takes reads in order until a half of the arena, or what is left of it, is full: while the caller
// works on one half, the other fills.
void Store::start_round(Fetch& fetch) {
  if (fetch.next_read == fetch.reads.size()) return;
  auto round = std::make_unique<ReadRound>();
  round->first = round->last = fetch.next_read;
  uint64_t taken = 0;
  while (round->last < fetch.reads.size()) {
    const Read& read = fetch.reads[round->last];
    if (taken > 0 && taken + read.length > arena_.size() / 2) break;
    const auto offset = arena_.allocate(read.length);
    if (!offset) break;
    round->arena_offset.push_back(*offset);
    taken += read.length;
    ++round->last;
  }
  if (round->first == round->last) return;  // other fetches hold the arena; wait() tries again
  try {
    for (size_t i = round->first; i < round->last; ++i) {
      const Read& read = fetch.reads[i];
      round->batch.add(*drives_[read.drive], io::OpKind::kRead, read.offset,
                       pool_.at(round->arena_offset[i - round->first]),
                       static_cast<uint32_t>(read.length));
    }
    round->batch.keep(pool_.region());
    round->batch.submit();
  } catch (...) {
    for (const uint64_t offset : round->arena_offset) arena_.release(offset);
    throw;
  }
  fetch.next_read = round->last;
  fetch.in_flight = std::move(round);
}

Store::Round Store::wait(int64_t id) {
  std::unique_lock lock(mutex_);
  Fetch& fetch = ticket(id);
  if (fetch.delivered) {
    for (const uint64_t offset : fetch.delivered->arena_offset) arena_.release(offset);
    fetch.delivered.reset();
  }
  if (!fetch.in_flight) {
    try {
      start_round(fetch);
    } catch (...) {
      drop_ticket(id);
      throw;
    }
  }
  if (!fetch.in_flight) {
    if (fetch.next_read == fetch.reads.size()) return {{}, false};
    throw Error(ErrorKind::kCapacity,
                "the staging arena (" + std::to_string(arena_.size()) + " bytes, " +
                    std::to_string(arena_.used()) +
                    " held by other fetches) has no room: release them, or raise `staging_bytes`");
  }
  std::vector<io::Failure> failures;
  fetch.waiting = true;
  lock.unlock();
  const auto begin = std::chrono::steady_clock::now();
  try {
    fetch.in_flight->batch.wait(drives_.front()->timeout());
  } catch (const Error&) {
    failures = fetch.in_flight->batch.failures();
  }
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
  lock.lock();
  fetch.waiting = false;
  traffic_.of(fetch.purpose).wait_seconds += waited.count();

  Round result;
  try {
    finish_round(fetch, failures);
    for (size_t i = fetch.delivered->first; i < fetch.delivered->last; ++i) {
      const Read& read = fetch.reads[i];
      for (int32_t p = read.first; p < read.first + read.count; ++p) {
        const Piece& piece = fetch.pieces[p];
        result.fetched.ids.push_back(fetch.wanted.entries[piece.wanted].id);
        result.fetched.slots.push_back(
            static_cast<int64_t>(fetch.delivered->arena_offset[i - fetch.delivered->first] +
                                 piece.offset - read.offset));
      }
    }
    start_round(fetch);
  } catch (...) {
    drop_ticket(id);
    throw;
  }
  result.more = fetch.next_read < fetch.reads.size() || fetch.in_flight != nullptr;
  return result;
}

// Checks what arrived, repairs it from other copies, and offers it to the cluster cache.
void Store::finish_round(Fetch& fetch, const std::vector<io::Failure>& failures) {
  fetch.delivered = std::move(fetch.in_flight);
  ReadRound& round = *fetch.delivered;
  std::unordered_map<size_t, const io::Failure*> failed;
  for (const io::Failure& failure : failures) {
    failed[round.first + failure.index] = &failure;
    // The kernel may still write where a read could not be cancelled: that memory is given up.
    if (failure.error == ETIMEDOUT) {
      round.arena_offset[failure.index] = static_cast<uint64_t>(-1);
    }
  }
  std::vector<std::vector<int32_t>> entries(fetch.segments.size());
  std::vector<std::vector<int64_t>> slots(fetch.segments.size());
  for (size_t i = round.first; i < round.last; ++i) {
    const Read& read = fetch.reads[i];
    const auto failure = failed.find(i);
    uint64_t& base = round.arena_offset[i - round.first];
    if (base == static_cast<uint64_t>(-1)) {
      const auto fresh = arena_.allocate(read.length);
      if (!fresh) {
        throw Error(ErrorKind::kStorage, "drive " + drives_[read.drive]->name() +
                                             " timed out and no staging memory is left to repair");
      }
      base = *fresh;
    }
    for (int32_t p = read.first; p < read.first + read.count; ++p) {
      const Piece& piece = fetch.pieces[p];
      const Wanted& wanted = fetch.wanted.entries[piece.wanted];
      const Segment& segment = *fetch.segments[wanted.segment];
      std::byte* data = pool_.at(base + piece.offset - read.offset);
      const bool intact =
          failure == failed.end() && (!options_.verify || checksum_of(data, segment.entry_bytes) ==
                                                              segment.checksum[wanted.entry]);
      if (!intact && !repair(fetch, wanted, fetch.chosen[piece.wanted], data)) {
        throw Error(ErrorKind::kStorage,
                    "drive " + drives_[read.drive]->name() + ": entry " +
                        std::to_string(wanted.entry) + " of " + segment.label +
                        (failure != failed.end() ? std::string(" could not be read: ") +
                                                       std::strerror(failure->second->error)
                                                 : std::string(" does not match its checksum")) +
                        ", and no other copy of it is intact. Replace the drive and build the "
                        "cache again.");
      }
      entries[wanted.segment].push_back(wanted.entry);
      slots[wanted.segment].push_back(static_cast<int64_t>(base + piece.offset - read.offset));
    }
  }
  if (fetch.purpose != Purpose::kDecode) return;
  for (size_t s = 0; s < fetch.segments.size(); ++s) {
    if (!entries[s].empty()) cache_.admit(*fetch.segments[s], entries[s], slots[s]);
  }
}

bool Store::repair(const Fetch& fetch, const Wanted& wanted, int32_t failed_position,
                   std::byte* out) {
  const Segment& segment = *fetch.segments[wanted.segment];
  const std::span<std::byte> target(out, segment.entry_bytes);
  for (const int32_t position : segment.routing.copies_of(wanted.entry)) {
    if (position == failed_position) continue;
    try {
      drives_[segment.placement.copies[position].drive]->read(segment.offset_of(position), target);
    } catch (const Error&) {
      continue;
    }
    if (checksum_of(out, segment.entry_bytes) == segment.checksum[wanted.entry]) {
      ++traffic_.of(fetch.purpose).repaired;
      return true;
    }
  }
  return false;
}

void Store::drop_ticket(int64_t id) {
  const auto found = tickets_.find(id);
  Fetch& fetch = *found->second;
  for (auto* round : {&fetch.in_flight, &fetch.delivered}) {
    if (!*round) continue;
    (*round)->batch = io::Batch();  // waits for what is in flight
    for (const uint64_t offset : (*round)->arena_offset) arena_.release(offset);
  }
  for (const auto& [segment, entry] : fetch.pinned) {
    cache_.unpin(*fetch.segments[segment], entry);
  }
  const std::vector<int64_t> segment_ids = std::move(fetch.segment_ids);
  tickets_.erase(found);
  for (const int64_t segment : segment_ids) {
    Held& record = segments_.at(segment);
    if (--record.fetches == 0 && record.doomed) destroy_segment(segment);
  }
}

void Store::release_ticket(int64_t id) {
  const std::lock_guard lock(mutex_);
  ticket(id);
  drop_ticket(id);
}

std::string Store::stats() {
  const std::lock_guard lock(mutex_);
  return stats_json(traffic_, budget_, pool_, cache_.size(), drives_, shapes_);
}

std::vector<std::string> Store::notes() {
  std::vector<std::string> notes;
  for (const auto& drive : drives_) {
    for (const std::string& note : drive->notes()) notes.push_back(drive->name() + ": " + note);
  }
  return notes;
}

}  // namespace swarm_kv
