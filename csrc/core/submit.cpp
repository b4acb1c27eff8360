// The first half of a fetch: plan, start.
#include <algorithm>
#include <tuple>

#include "core/store.h"
#include "io/error.h"

namespace swarm_kv {
namespace {

// Kept by each thread, so that a step as large as the last one allocates nothing.
thread_local std::vector<int32_t> t_numbers;       // per segment of each row: index in the step
thread_local std::vector<Selection> t_selections;  // per row
thread_local std::vector<Arrival> t_resident;
thread_local std::vector<Arrival> t_on_device;
thread_local std::vector<int32_t> t_activated;

// What a fetch gets from the prefetch that it rides on.
struct Carried {
  std::vector<int64_t> slots;                       // per entry of the prefetch, as Fetch::slots
  std::vector<std::pair<int32_t, int32_t>> takers;  // per entry: the fetch's, first and count
  int64_t used = 0;

  void reset(const Fetch& early) {
    const std::vector<Piece>& pieces = early.step.pieces;
    used = 0;
    takers.assign(pieces.size(), {0, 0});
    slots.resize(pieces.size());
    for (size_t p = 0; p < pieces.size(); ++p) slots[pieces[p].wanted] = early.slots[p];
  }

  // Removes from `wanted` what the prefetch brings; what it has brought already is resident.
  void take_from(const Fetch& fetch, const Fetch& early, WantedList& wanted,
                 std::vector<Arrival>& resident) {
    // Both lists ascend within a segment.
    const std::vector<Wanted>& brought = early.step.wanted.entries;
    int32_t segment = -1;
    size_t at = 0;
    size_t end = 0;
    std::erase_if(wanted.entries, [&](const Wanted& entry) {
      if (entry.segment != segment) {
        segment = entry.segment;
        const auto same = std::ranges::find(early.segments, fetch.segments[segment]);
        const auto range = std::ranges::equal_range(
            brought, static_cast<int32_t>(same - early.segments.begin()), {}, &Wanted::segment);
        at = range.begin() - brought.begin();
        end = range.end() - brought.begin();
      }
      while (at < end && brought[at].entry < entry.entry) ++at;
      if (at == end || brought[at].entry != entry.entry || slots[at] == Fetch::kNotStarted) {
        return false;
      }
      if (entry.repeat) return true;
      ++used;
      if (slots[at] == Fetch::kInFlight) {
        takers[at] = {entry.first_taker, entry.takers};
      } else {
        arrive(wanted, entry, slots[at], resident);
      }
      return true;
    });
  }
};

thread_local Carried t_carried;

}  // namespace

int64_t Store::submit(std::span<const Row> rows, Purpose purpose, int64_t ahead, Delivery& resident,
                      Delivery* on_device) {
  Lock lock(mutex_);
  check_open();
  Fetch* early = ahead == 0 ? nullptr : &ticket(ahead);
  if (early && (purpose == Purpose::kPrefetch || early->purpose != Purpose::kPrefetch)) {
    throw Error(ErrorKind::kArgument,
                "`ahead` (" + std::to_string(ahead) +
                    ") must be the ticket of a prefetch, and what rides on it must not be one");
  }
  std::unique_ptr<Fetch> fetch = idle_fetch();
  fetch->purpose = purpose;
  fetch->rows = rows.size();
  name_segments(*fetch, rows);
  t_resident.clear();
  t_on_device.clear();
  const auto minus_fast_memory = [&](WantedList& wanted) {
    if (purpose == Purpose::kDecode) touch(*fetch);
    // A guess is for a step on the device.
    if (device_ && (on_device != nullptr || purpose == Purpose::kPrefetch)) {
      take_kept_on_device(*fetch, wanted);
    }
    take_cached(*fetch, wanted);
    if (early == nullptr) return;
    t_carried.reset(*early);
    t_carried.take_from(*fetch, *early, wanted, t_resident);
  };
  fetch->step.plan(t_selections, *router_, load_, shapes_, minus_fast_memory, largest_read(*fetch));
  fetch->slots.assign(fetch->step.pieces.size(), Fetch::kNotStarted);
  if (early != nullptr) ride(*fetch, take_ticket(*early));
  const bool reads = prepare_round(*fetch, *fetch->arriving);

  fetch->ticket = next_handle_++;
  for (const int64_t id : fetch->segment_ids) ++held(id).fetches;
  deliver(t_resident, fetch->rows, resident);
  if (on_device != nullptr) deliver(t_on_device, fetch->rows, *on_device);
  const int64_t id = fetch->ticket;
  Fetch& started = *tickets_.emplace_back(std::move(fetch));
  if (reads) start_round(lock, started, *started.arriving);
  return id;
}

// Resolves the segments of all rows, each once, and how each row names them.
void Store::name_segments(Fetch& fetch, std::span<const Row> rows) {
  t_numbers.clear();
  t_selections.clear();
  for (const Row& row : rows) {
    for (const int64_t id : row.segments) {
      const auto known = std::ranges::find(fetch.segment_ids, id);
      t_numbers.push_back(static_cast<int32_t>(known - fetch.segment_ids.begin()));
      if (known != fetch.segment_ids.end()) continue;
      fetch.segments.push_back(held(id).segment);
      fetch.segment_ids.push_back(id);
      fetch.step.segments.push_back(fetch.segments.back().get());
    }
  }
  std::span<const int32_t> numbers(t_numbers);
  for (const Row& row : rows) {
    t_selections.push_back(
        {numbers.first(row.segments.size()), row.clusters, row.entries, row.limit});
    numbers = numbers.subspan(row.segments.size());
  }
}

// Counts the activations of a decoding step, also of segments without any.
void Store::touch(const Fetch& fetch) {
  auto next = fetch.step.wanted.entries.begin();
  const auto end = fetch.step.wanted.entries.end();
  for (int32_t s = 0; s < static_cast<int32_t>(fetch.segments.size()); ++s) {
    t_activated.clear();
    for (; next != end && next->segment == s; ++next) {
      if (!next->repeat) t_activated.push_back(next->entry);
    }
    cache_.touch(*fetch.segments[s], t_activated);
    if (device_) device_->cache().touch(*fetch.segments[s], t_activated);
  }
}

// Removes what the device's cluster cache holds. Nothing is pinned: until the step has enqueued
// what reads it, nobody else works there.
void Store::take_kept_on_device(Fetch& fetch, WantedList& wanted) {
  Traffic::Count& count = traffic_.of(fetch.purpose);
  std::erase_if(wanted.entries, [&](const Wanted& entry) {
    const int64_t slot = device_->cache().find(*fetch.segments[entry.segment], entry.entry);
    if (slot < 0) return false;
    if (entry.repeat) return true;
    ++count.wanted;
    ++count.hits;
    if (fetch.purpose == Purpose::kPrefetch) return true;
    device_->count_hit();
    arrive(wanted, entry, slot, t_on_device);
    return true;
  });
}

// Removes what the cluster cache holds from what must be read.
void Store::take_cached(Fetch& fetch, WantedList& wanted) {
  Traffic::Count& count = traffic_.of(fetch.purpose);
  ++count.fetches;
  for (const Wanted& entry : wanted.entries) {
    cache_.foresee(*fetch.segments[entry.segment], entry.entry);
  }
  std::erase_if(wanted.entries, [&](const Wanted& entry) {
    const Segment& segment = *fetch.segments[entry.segment];
    const int64_t slot = cache_.find(segment, entry.entry);
    count.wanted += !entry.repeat;
    if (slot < 0) return false;
    if (entry.repeat) return true;
    ++count.hits;
    // A guess pins nothing: it would keep memory from the window, which grows before the fetch that
    // rides on it.
    if (fetch.purpose == Purpose::kPrefetch) return true;
    cache_.pin(segment, entry.entry);
    fetch.pinned.emplace_back(entry.segment, entry.entry);
    arrive(wanted, entry, slot, t_resident);
    return true;
  });
}

// Makes a prefetch, of which t_carried tells what is used, a part of the fetch.
void Store::ride(Fetch& fetch, std::unique_ptr<Fetch> ahead) {
  Step& early = ahead->step;
  for (size_t i = 0; i < early.wanted.entries.size(); ++i) {
    Wanted& entry = early.wanted.entries[i];
    std::tie(entry.first_taker, entry.takers) = t_carried.takers[i];
  }
  // What nobody wants is not waited for.
  ReadRound& round = *ahead->arriving;
  round.awaited = 0;
  if (round.holds_memory()) {
    for (size_t i = round.first; i < round.last; ++i) {
      round.awaited += early.has_takers(early.reads[i]);
    }
  }
  Traffic::Ahead& counts = traffic_.ahead;
  counts.used += t_carried.used;
  counts.wasted += ahead->started - t_carried.used;
  for (const Wanted& entry : fetch.step.wanted.entries) counts.late += !entry.repeat;
  counts.late_requests += fetch.step.reads.size();
  for (const Read& read : fetch.step.reads) counts.late_bytes += read.length;
  fetch.ahead = std::move(ahead);
}

uint64_t Store::largest_read(const Fetch& fetch) const {
  // Decoded entries take several times the room of what was read.
  int64_t decoded = 0;
  for (const auto& segment : fetch.segments) {
    if (segment->codec) decoded = std::max(decoded, pool_.entry_bytes() / segment->entry_bytes + 1);
  }
  const uint64_t room = std::max<uint64_t>(pool_.entry_bytes() + 2 * Arena::kGranule,
                                           std::min<uint64_t>(kMaxRead, arena_.size() / 8));
  return room / (1 + decoded);
}

uint64_t Store::staged_bytes(const Fetch& fetch, const Read& read) const {
  uint64_t bytes = read.length;
  for (int32_t p = read.first; p < read.first + read.count; ++p) {
    const Wanted& wanted = fetch.step.wanted.entries[fetch.step.pieces[p].wanted];
    if (fetch.segments[wanted.segment]->codec) bytes += pool_.entry_bytes();
  }
  return Arena::rounded(bytes);
}

// Gives the next reads memory, in order: half the arena to the first round and a quarter to each
// further one, so that one can follow another while the caller works on a third. Prefetches
// together get a half, so that the step that is due never finds the arena full of guesses. False
// when no read is left, or other fetches hold the arena.
bool Store::prepare_round(Fetch& fetch, ReadRound& round) {
  const std::vector<Read>& reads = fetch.step.reads;
  if (fetch.all_started()) return false;
  late_ranges_->take(came_back_);
  for (const ArenaRange& range : came_back_) arena_.release(range.offset, range.bytes);

  uint64_t room = arena_.longest_free();
  if (fetch.purpose == Purpose::kPrefetch) {
    room = std::min(room, arena_.size() / 2 - std::min(arena_.size() / 2, prefetch_bytes_));
  } else {  // one read, however large
    const uint64_t share = arena_.size() / (fetch.next_read == 0 ? 2 : 4);
    room = std::min(room, std::max(share, staged_bytes(fetch, reads[fetch.next_read])));
  }
  uint64_t end = 0;
  size_t last = fetch.next_read;
  round.place.clear();
  while (last < reads.size()) {
    const uint64_t bytes = staged_bytes(fetch, reads[last]);
    if (end + bytes > room) break;
    round.place.push_back(end);
    end += bytes;
    ++last;
  }
  if (last == fetch.next_read) return false;
  round.place.push_back(end);
  const uint64_t base = *arena_.allocate(end);
  for (uint64_t& place : round.place) place += base;
  round.first = fetch.next_read;
  round.last = fetch.next_read = last;
  round.awaited = last - round.first;
  round.due.clear();
  if (!round.lease) {
    round.lease = std::make_shared<Lease>(Lease{pool_.region(), late_ranges_, {}});
  }
  if (fetch.purpose == Purpose::kPrefetch) prefetch_bytes_ += end;

  Traffic::Count& count = traffic_.of(fetch.purpose);
  for (size_t i = round.first; i < last; ++i) {
    const Read& read = reads[i];
    round.batch.add(*drives_[read.drive], io::OpKind::kRead, read.offset,
                    pool_.at(static_cast<int64_t>(round.place[i - round.first])),
                    static_cast<uint32_t>(read.length));
    round.due.push_back(load_.start(read));
    std::fill_n(fetch.slots.begin() + read.first, read.count, int64_t{Fetch::kInFlight});
    fetch.started += read.count;
    count.read += read.count;
    ++count.requests;
    count.bytes += read.length;
    ++count.drive_requests[read.drive];
    count.drive_bytes[read.drive] += read.length;
  }
  round.batch.keep(round.lease);
  return true;
}

// Hands a prepared round to the drives.
void Store::start_round(Lock& lock, Fetch& fetch, ReadRound& round) {
  fetch.busy = true;
  lock.unlock();
  try {
    round.batch.submit();
  } catch (...) {
    round.batch = io::Batch();
    lock.lock();
    end(lock, fetch);
    throw;
  }
  lock.lock();
  fetch.busy = false;
}

}  // namespace swarm_kv
