// The first half of a fetch: dedupe, subtract what the cluster cache holds, balance, coalesce,
// submit.
#include <algorithm>

#include "core/store.h"
#include "io/error.h"

namespace swarm_kv {

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
  // Decoded entries take several times the room of what was read.
  int64_t decoded = 0;
  for (const Segment* segment : pointers) {
    if (segment->codec) decoded = std::max(decoded, pool_.entry_bytes() / segment->entry_bytes + 1);
  }
  const uint64_t room = std::max<uint64_t>(pool_.entry_bytes() + 2 * Arena::kGranule,
                                           std::min<uint64_t>(kMaxRead, arena_.size() / 8));
  const uint64_t largest = room / (1 + decoded);
  fetch->plan = plan_reads(pointers, fetch->wanted, *router_, shapes_, largest);
  for (const Read& read : fetch->plan.reads) {
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

uint64_t Store::staged_bytes(const Fetch& fetch, const Read& read) const {
  uint64_t bytes = read.length;
  for (int32_t p = read.first; p < read.first + read.count; ++p) {
    const Wanted& wanted = fetch.wanted.entries[fetch.plan.pieces[p].wanted];
    if (fetch.segments[wanted.segment]->codec) bytes += pool_.entry_bytes();
  }
  return bytes;
}

// Takes reads in order until a half of the arena, or what is left of it, is full: while the caller
// works on one half, the other fills.
void Store::start_round(Fetch& fetch) {
  if (fetch.next_read == fetch.plan.reads.size()) return;
  auto round = std::make_unique<ReadRound>();
  round->first = round->last = fetch.next_read;
  uint64_t taken = 0;
  while (round->last < fetch.plan.reads.size()) {
    const Read& read = fetch.plan.reads[round->last];
    const uint64_t bytes = staged_bytes(fetch, read);
    if (taken > 0 && taken + bytes > arena_.size() / 2) break;
    const auto offset = arena_.allocate(bytes);
    if (!offset) break;
    round->arena_offset.push_back(*offset);
    taken += bytes;
    ++round->last;
  }
  if (round->first == round->last) return;  // other fetches hold the arena; wait() tries again
  try {
    for (size_t i = round->first; i < round->last; ++i) {
      const Read& read = fetch.plan.reads[i];
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

}  // namespace swarm_kv
