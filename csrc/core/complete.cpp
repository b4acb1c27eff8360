// The second half of a fetch: wait, check, repair from a replica, offer to the cluster cache,
// release.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "core/store.h"
#include "io/error.h"

namespace swarm_kv {

Store::Round Store::wait(int64_t id) {
  std::unique_lock lock(mutex_);
  Fetch& fetch = ticket(id);
  release_round(fetch, fetch.delivered);
  if (fetch.ahead) release_round(*fetch.ahead, fetch.ahead->delivered);
  Round result;
  deliver({}, fetch.rows, result.arrived);
  // What was read ahead comes first: it was submitted first.
  Fetch& due = fetch.ahead && fetch.ahead->in_flight ? *fetch.ahead : fetch;
  if (!due.in_flight) {
    try {
      start_round(fetch);
      await_arena(lock, fetch);
    } catch (...) {
      drop_ticket(id);
      throw;
    }
    if (!fetch.in_flight) {
      result.more = false;
      if (fetch.next_read == fetch.plan.reads.size()) return result;
      throw Error(
          ErrorKind::kCapacity,
          "the staging arena (" + std::to_string(arena_.size()) + " bytes, " +
              std::to_string(arena_.used()) +
              " held by other fetches) has no room: release them, or raise `staging_bytes`");
    }
  }
  std::vector<io::Failure> failures;
  fetch.waiting = true;
  lock.unlock();
  const auto begin = std::chrono::steady_clock::now();
  try {
    due.in_flight->batch.wait(drives_.front()->timeout());
  } catch (const Error&) {
    failures = due.in_flight->batch.failures();
  }
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
  lock.lock();
  fetch.waiting = false;
  traffic_.of(fetch.purpose).wait_seconds += waited.count();

  try {
    finish_round(due, failures);
    std::vector<Arrival> arrivals;
    size_t slot = 0;
    for (size_t i = due.delivered->first; i < due.delivered->last; ++i) {
      const Read& read = due.plan.reads[i];
      for (int32_t p = read.first; p < read.first + read.count; ++p) {
        arrive(fetch.wanted, due.wanted.entries[due.plan.pieces[p].wanted],
               due.delivered->slots[slot++], arrivals);
      }
    }
    deliver(arrivals, fetch.rows, result.arrived);
    if (!fetch.in_flight) start_round(fetch);
  } catch (...) {
    drop_ticket(id);
    throw;
  }
  result.more = fetch.next_read < fetch.plan.reads.size() || fetch.in_flight != nullptr;
  return result;
}

// Blocks while fetches of other threads hold the arena. One's own would never be released
// meanwhile.
void Store::await_arena(std::unique_lock<std::mutex>& lock, Fetch& fetch) {
  const auto deadline = std::chrono::steady_clock::now() + drives_.front()->timeout();
  const auto held_by_another_thread = [&] {
    return std::any_of(tickets_.begin(), tickets_.end(), [&](const auto& ticket) {
      const Fetch& other = *ticket.second;
      return other.owner != fetch.owner && other.holds_memory();
    });
  };
  while (!fetch.in_flight && fetch.next_read < fetch.plan.reads.size() &&
         held_by_another_thread()) {
    fetch.waiting = true;
    const auto woken = arena_released_.wait_until(lock, deadline);
    fetch.waiting = false;
    if (woken == std::cv_status::timeout) return;
    start_round(fetch);
  }
}

void Store::release_round(const Fetch& fetch, std::unique_ptr<ReadRound>& round) {
  if (!round) return;
  if (fetch.purpose == Purpose::kPrefetch) prefetch_bytes_ -= round->bytes;
  round->batch = io::Batch();  // waits for what is in flight
  for (const uint64_t offset : round->arena_offset) arena_.release(offset);
  round.reset();
  arena_released_.notify_all();
}

// Checks what arrived, repairs it from other copies, decodes it, and offers it to the cluster
// cache.
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
    const Read& read = fetch.plan.reads[i];
    const auto failure = failed.find(i);
    uint64_t& base = round.arena_offset[i - round.first];
    if (base == static_cast<uint64_t>(-1)) {
      const auto fresh = arena_.allocate(staged_bytes(fetch, read));
      if (!fresh) {
        throw Error(ErrorKind::kStorage, "drive " + drives_[read.drive]->name() +
                                             " timed out and no staging memory is left to repair");
      }
      base = *fresh;
    }
    uint64_t decoded = base + read.length;
    for (int32_t p = read.first; p < read.first + read.count; ++p) {
      const Piece& piece = fetch.plan.pieces[p];
      const Wanted& wanted = fetch.wanted.entries[piece.wanted];
      const Segment& segment = *fetch.segments[wanted.segment];
      std::byte* data = pool_.at(base + piece.offset - read.offset);
      const bool intact =
          failure == failed.end() && (!options_.verify || checksum_of(data, segment.entry_bytes) ==
                                                              segment.checksum[wanted.entry]);
      if (!intact && !repair(fetch, wanted, fetch.plan.chosen[piece.wanted], data)) {
        throw Error(ErrorKind::kStorage,
                    "drive " + drives_[read.drive]->name() + ": entry " +
                        std::to_string(wanted.entry) + " of " + segment.label +
                        (failure != failed.end() ? std::string(" could not be read: ") +
                                                       std::strerror(failure->second->error)
                                                 : std::string(" does not match its checksum")) +
                        ", and no other copy of it is intact. Replace the drive and build the "
                        "cache again.");
      }
      uint64_t slot = base + piece.offset - read.offset;
      if (segment.codec) {
        slot = std::exchange(decoded, decoded + pool_.entry_bytes());
        segment.codec->decode(data, pool_.at(slot));
      }
      round.slots.push_back(static_cast<int64_t>(slot));
      entries[wanted.segment].push_back(wanted.entry);
      slots[wanted.segment].push_back(static_cast<int64_t>(slot));
    }
  }
  if (fetch.purpose == Purpose::kStream) return;
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
      drives_[segment.placement.drive[position]]->read(segment.offset_of(position), target);
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
  const std::unique_ptr<Fetch> fetch = std::move(found->second);
  tickets_.erase(found);
  if (fetch->purpose == Purpose::kPrefetch) traffic_.ahead.wasted += fetch->started;
  if (fetch->ahead) drop(*fetch->ahead);
  drop(*fetch);
}

void Store::drop(Fetch& fetch) {
  for (auto* round : {&fetch.in_flight, &fetch.delivered, &fetch.lasting}) {
    release_round(fetch, *round);
  }
  for (const auto& [segment, entry] : fetch.pinned) {
    cache_.unpin(*fetch.segments[segment], entry);
  }
  for (const int64_t segment : fetch.segment_ids) {
    Held& record = segments_.at(segment);
    if (--record.fetches == 0 && record.doomed) destroy_segment(segment);
  }
}

void Store::release_ticket(int64_t id) {
  const std::lock_guard lock(mutex_);
  ticket(id);
  drop_ticket(id);
}

}  // namespace swarm_kv
