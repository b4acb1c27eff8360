// The second half of a fetch: wait, check, repair from a replica, decode, offer to the cluster
// cache.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "core/store.h"
#include "io/error.h"

namespace swarm_kv {
namespace {

// Kept by each thread, so that a part as large as the last one allocates nothing.
thread_local std::vector<ClusterCache::Offer> t_offers;

Error released_meanwhile(int64_t ticket) {
  return Error(ErrorKind::kState,
               "ticket " + std::to_string(ticket) + " was released while it was waited for");
}

}  // namespace

bool Store::wait(int64_t id, Delivery& arrived) {
  Lock lock(mutex_);
  Fetch& fetch = ticket(id);
  release_round(fetch, *fetch.delivered);
  deliver({}, fetch.rows, arrived);
  // What was read ahead comes first: it was submitted first.
  Fetch& due = fetch.ahead && fetch.ahead->arriving->awaited > 0 ? *fetch.ahead : fetch;
  if (due.arriving->awaited == 0) {
    if (fetch.all_started()) return false;
    if (!prepare_round(fetch, *fetch.arriving) && !await_arena(lock, fetch)) {
      throw Error(
          ErrorKind::kCapacity,
          "the staging arena (" + std::to_string(arena_.size()) + " bytes, " +
              std::to_string(arena_.used()) +
              " held by other fetches) has no room: release them, or raise `staging_bytes`");
    }
    start_round(lock, fetch, *fetch.arriving);
  }
  if (fetch.arriving->awaited > 0 && !fetch.following->holds_memory() &&
      prepare_round(fetch, *fetch.following)) {
    start_round(lock, fetch, *fetch.following);
  }
  const auto begin = std::chrono::steady_clock::now();
  fetch.busy = true;
  lock.unlock();
  std::span<const uint32_t> taken;
  std::chrono::duration<double> waited;
  try {
    taken = due.arriving->batch.take(drives_.front()->timeout());
    waited = std::chrono::steady_clock::now() - begin;
    receive(fetch, due, taken);
  } catch (...) {
    lock.lock();
    for (const uint32_t index : taken) load_.drop(due.step.reads[due.arriving->first + index]);
    end(lock, fetch);
    throw;
  }
  lock.lock();
  fetch.busy = false;
  traffic_.of(fetch.purpose).wait_seconds += waited.count();
  account(fetch, due, taken);
  deliver(fetch.arrivals, fetch.rows, arrived);
  if (fetch.arriving->awaited == 0 && &due == &fetch) {
    std::swap(fetch.arriving, fetch.delivered);
    std::swap(fetch.arriving, fetch.following);
    // The next reads run while the caller works on these.
    if (!fetch.released && !fetch.arriving->holds_memory() &&
        prepare_round(fetch, *fetch.arriving)) {
      start_round(lock, fetch, *fetch.arriving);
    }
  }
  if (fetch.released) {
    end(lock, fetch);
    throw released_meanwhile(id);
  }
  return !fetch.all_started() || fetch.arriving->awaited > 0 ||
         (fetch.ahead && fetch.ahead->arriving->awaited > 0);
}

// Prepares a round when fetches of other threads have given the arena back; false at the time-out,
// or when no others hold it: one's own would never be released meanwhile.
bool Store::await_arena(Lock& lock, Fetch& fetch) {
  const auto deadline = std::chrono::steady_clock::now() + drives_.front()->timeout();
  // Threads that are blocked here themselves release nothing: the last one that comes must not join
  // them.
  const auto blocked = [&](std::thread::id owner) {
    return std::ranges::any_of(
        tickets_, [&](const auto& other) { return other->owner == owner && other->starving; });
  };
  const auto held_by_another_thread = [&] {
    return ending_ > 0 || std::ranges::any_of(tickets_, [&](const auto& other) {
             return other->owner != fetch.owner && other->holds_memory() && !blocked(other->owner);
           });
  };
  while (held_by_another_thread()) {
    fetch.busy = fetch.starving = true;
    const auto woken = arena_released_.wait_until(lock, deadline);
    fetch.busy = fetch.starving = false;
    if (fetch.released) {
      const int64_t id = fetch.ticket;
      end(lock, fetch);
      throw released_meanwhile(id);
    }
    if (prepare_round(fetch, *fetch.arriving)) return true;
    if (woken == std::cv_status::timeout) return false;
  }
  return prepare_round(fetch, *fetch.arriving);
}

// Checks, repairs and decodes the reads that were taken.
void Store::receive(Fetch& fetch, Fetch& due, std::span<const uint32_t> taken) {
  fetch.arrivals.clear();
  fetch.repaired = 0;
  ReadRound& round = *due.arriving;
  for (const uint32_t index : taken) {
    const Read& read = due.step.reads[round.first + index];
    const int error = round.batch.error(index);
    uint64_t base = round.place[index];
    const uint64_t bytes = round.place[index + 1] - base;
    // The kernel may still write where a read could not be cancelled.
    if (error == ETIMEDOUT && round.batch.gave_up()) {
      base = refuge(round, bytes, read);
    }
    uint64_t decoded = base + read.length;
    for (int32_t p = read.first; p < read.first + read.count; ++p) {
      const Piece& piece = due.step.pieces[p];
      const Wanted& wanted = due.step.wanted.entries[piece.wanted];
      if (wanted.repeat) continue;
      uint64_t slot = base + piece.offset - read.offset;
      std::byte* data = pool_.at(static_cast<int64_t>(slot));
      const Segment& segment = *due.step.segments[wanted.segment];
      if (!intact(segment, wanted, error, data)) {
        if (wanted.takers == 0) continue;  // it was only read ahead
        if (!repair(segment, wanted, due.step.chosen[piece.wanted], data)) {
          fail(segment, wanted, read, error);
        }
        ++fetch.repaired;
      }
      if (segment.codec) {
        slot = std::exchange(decoded, decoded + pool_.entry_bytes());
        segment.codec->decode(data, pool_.at(static_cast<int64_t>(slot)));
      }
      due.slots[p] = static_cast<int64_t>(slot);
      arrive(fetch.step.wanted, wanted, due.slots[p], fetch.arrivals);
    }
  }
}

bool Store::intact(const Segment& segment, const Wanted& wanted, int error,
                   const std::byte* data) const {
  return error == 0 && (!options_.verify ||
                        checksum_of(data, segment.entry_bytes) == segment.checksum[wanted.entry]);
}

// Reads another copy of an entry.
bool Store::repair(const Segment& segment, const Wanted& wanted, int32_t failed_position,
                   std::byte* out) const {
  const std::span<std::byte> target(out, segment.entry_bytes);
  for (const int32_t position : segment.routing.copies_of(wanted.entry)) {
    if (position == failed_position) continue;
    try {
      drives_[segment.placement.drive[position]]->read(segment.offset_of(position), target);
    } catch (const Error&) {
      continue;
    }
    if (checksum_of(out, segment.entry_bytes) == segment.checksum[wanted.entry]) return true;
  }
  return false;
}

void Store::fail(const Segment& segment, const Wanted& wanted, const Read& read, int error) const {
  throw Error(ErrorKind::kStorage,
              "drive " + drives_[read.drive]->name() + ": entry " + std::to_string(wanted.entry) +
                  " of " + segment.label +
                  (error != 0 ? std::string(" could not be read: ") + std::strerror(error)
                              : std::string(" does not match its checksum")) +
                  ", and no other copy of it is intact. Replace the drive and build the cache "
                  "again.");
}

// Memory for a read whose own was given up.
uint64_t Store::refuge(ReadRound& round, uint64_t bytes, const Read& read) {
  const std::lock_guard lock(mutex_);
  const auto offset = arena_.allocate(bytes);
  if (!offset) {
    throw Error(ErrorKind::kStorage, "drive " + drives_[read.drive]->name() +
                                         " timed out and no staging memory is left to repair");
  }
  round.refuge.push_back({*offset, bytes});
  return *offset;
}

// What the reads that were taken tell of their drives, and what the cluster cache gets of them.
void Store::account(Fetch& fetch, Fetch& due, std::span<const uint32_t> taken) {
  ReadRound& round = *due.arriving;
  for (const uint32_t index : taken) {
    const Read& read = due.step.reads[round.first + index];
    round.awaited -= &due == &fetch || due.step.has_takers(read);
    load_.end(read, round.due[index], static_cast<double>(round.batch.latency_ns(index)) * 1e-9);
  }
  load_.learn();
  traffic_.of(due.purpose).repaired += fetch.repaired;
  if (due.purpose == Purpose::kStream) return;

  t_offers.clear();
  for (const uint32_t index : taken) {
    const Read& read = due.step.reads[round.first + index];
    for (int32_t p = read.first; p < read.first + read.count; ++p) {
      const Wanted& wanted = due.step.wanted.entries[due.step.pieces[p].wanted];
      if (due.slots[p] >= 0) t_offers.push_back({wanted.segment, wanted.entry, due.slots[p]});
    }
  }
  cache_.admit(t_offers, [&due](int64_t index) -> Segment& { return *due.segments[index]; });
}

}  // namespace swarm_kv
