// The first half of a fetch: dedupe, subtract what fast memory holds or a prefetch brings, balance,
// coalesce, submit.
#include <algorithm>
#include <optional>
#include <tuple>

#include "core/store.h"
#include "io/error.h"

namespace swarm_kv {
namespace {

// What a fetch gets from the prefetch that it rides on.
struct Carried {
  enum : int64_t { kNotStarted = -2, kInFlight = -1 };  // else: the slot where it lies
  std::vector<int64_t> state;                           // per entry of the prefetch
  std::vector<std::pair<int32_t, int32_t>> takers;      // per entry: the fetch's, first and count
  int64_t used = 0;

  explicit Carried(const Fetch& early)
      : state(early.wanted.entries.size(), kNotStarted), takers(state.size(), {0, 0}) {
    const auto mark = [&](const ReadRound& round, bool arrived) {
      size_t slot = 0;
      for (size_t i = round.first; i < round.last; ++i) {
        const Read& read = early.plan.reads[i];
        for (int32_t p = read.first; p < read.first + read.count; ++p) {
          state[early.plan.pieces[p].wanted] = arrived ? round.slots[slot++] : int64_t{kInFlight};
        }
      }
    };
    if (early.in_flight) mark(*early.in_flight, false);
    if (early.delivered) mark(*early.delivered, true);
  }

  // Removes what the prefetch brings from what the fetch must read; what it has brought already is
  // appended to `resident`.
  void take_from(Fetch& fetch, const Fetch& early, std::vector<Arrival>& resident) {
    // Both lists ascend within a segment.
    const std::vector<Wanted>& brought = early.wanted.entries;
    int32_t segment = -1;
    size_t at = 0;
    std::erase_if(fetch.wanted.entries, [&](const Wanted& wanted) {
      if (wanted.segment != segment) {
        segment = wanted.segment;
        const auto same =
            std::find(early.segments.begin(), early.segments.end(), fetch.segments[segment]);
        const auto number = static_cast<int32_t>(same - early.segments.begin());
        at = std::lower_bound(brought.begin(), brought.end(), number,
                              [](const Wanted& a, int32_t b) { return a.segment < b; }) -
             brought.begin();
      }
      const auto same_segment = [&] {
        return at < brought.size() &&
               early.segments[brought[at].segment] == fetch.segments[segment];
      };
      while (same_segment() && brought[at].entry < wanted.entry) ++at;
      if (!same_segment() || brought[at].entry != wanted.entry || state[at] == kNotStarted) {
        return false;
      }
      ++used;
      if (state[at] == kInFlight) {
        takers[at] = {wanted.first_taker, wanted.takers};
      } else {
        arrive(fetch.wanted, wanted, state[at], resident);
      }
      return true;
    });
  }
};

}  // namespace

Store::Submitted Store::submit(std::span<const Row> rows, Purpose purpose, int64_t ahead) {
  const std::lock_guard lock(mutex_);
  check_open();
  if (ahead != 0 &&
      (purpose == Purpose::kPrefetch || ticket(ahead).purpose != Purpose::kPrefetch)) {
    throw Error(ErrorKind::kArgument,
                "`ahead` (" + std::to_string(ahead) +
                    ") must be the ticket of a prefetch, and what rides on it must not be one");
  }
  auto fetch = std::make_unique<Fetch>();
  fetch->purpose = purpose;
  fetch->rows = rows.size();
  // The step's segments: those of all rows, each once.
  std::vector<int32_t> numbers;
  for (const Row& row : rows) {
    for (const int64_t id : row.segments) {
      const auto known = std::find(fetch->segment_ids.begin(), fetch->segment_ids.end(), id);
      numbers.push_back(static_cast<int32_t>(known - fetch->segment_ids.begin()));
      if (known != fetch->segment_ids.end()) continue;
      fetch->segments.push_back(held(id).segment);
      fetch->segment_ids.push_back(id);
    }
  }
  std::vector<Selection> selections;
  for (size_t row = 0, first = 0; row < rows.size(); first += rows[row++].segments.size()) {
    selections.push_back({std::span(numbers).subspan(first, rows[row].segments.size()),
                          rows[row].clusters, rows[row].entries, rows[row].limit});
  }
  const auto segments = fetch->segment_pointers();
  fetch->wanted = dedupe(segments, selections);

  Traffic::Count& count = traffic_.of(purpose);
  ++count.fetches;
  count.wanted += fetch->wanted.entries.size();
  if (purpose == Purpose::kDecode) touch(*fetch);
  std::vector<Arrival> resident;
  take_cached(*fetch, resident);
  std::optional<Carried> carried;
  Fetch* early = ahead != 0 ? tickets_.at(ahead).get() : nullptr;
  if (early != nullptr) {
    carried.emplace(*early);
    carried->take_from(*fetch, *early, resident);
  }
  // Decoded entries take several times the room of what was read.
  int64_t decoded = 0;
  for (const Segment* segment : segments) {
    if (segment->codec) decoded = std::max(decoded, pool_.entry_bytes() / segment->entry_bytes + 1);
  }
  const uint64_t room = std::max<uint64_t>(pool_.entry_bytes() + 2 * Arena::kGranule,
                                           std::min<uint64_t>(kMaxRead, arena_.size() / 8));
  const uint64_t largest = room / (1 + decoded);
  fetch->plan = plan_reads(segments, fetch->wanted, *router_, shapes_, largest);
  try {
    start_round(*fetch);
  } catch (...) {
    for (const auto& [segment, entry] : fetch->pinned) cache_.unpin(*segments[segment], entry);
    throw;
  }
  if (early != nullptr) {
    for (size_t i = 0; i < carried->takers.size(); ++i) {
      Wanted& entry = early->wanted.entries[i];
      std::tie(entry.first_taker, entry.takers) = carried->takers[i];
    }
    early->lasting = std::move(early->delivered);
    Traffic::Ahead& counts = traffic_.ahead;
    counts.used += carried->used;
    counts.wasted += early->started - carried->used;
    counts.late += fetch->wanted.entries.size();
    counts.late_requests += fetch->plan.reads.size();
    for (const Read& read : fetch->plan.reads) counts.late_bytes += read.length;
    fetch->ahead = std::move(tickets_.at(ahead));
    tickets_.erase(ahead);
  }
  for (const int64_t id : fetch->segment_ids) ++held(id).fetches;
  Submitted submitted{next_handle_, {}};
  deliver(resident, fetch->rows, submitted.resident);
  tickets_[next_handle_++] = std::move(fetch);
  return submitted;
}

void Store::touch(const Fetch& fetch) {
  std::vector<int32_t> activated;
  auto next = fetch.wanted.entries.begin();
  for (size_t s = 0; s < fetch.segments.size(); ++s) {
    activated.clear();
    for (; next != fetch.wanted.entries.end() && next->segment == static_cast<int32_t>(s); ++next) {
      activated.push_back(next->entry);
    }
    cache_.touch(*fetch.segments[s], activated);
  }
}

// Removes what the cluster cache holds from what must be read.
void Store::take_cached(Fetch& fetch, std::vector<Arrival>& resident) {
  Traffic::Count& count = traffic_.of(fetch.purpose);
  std::erase_if(fetch.wanted.entries, [&](const Wanted& wanted) {
    const Segment& segment = *fetch.segments[wanted.segment];
    const int64_t slot = cache_.find(segment, wanted.entry);
    if (slot < 0) return false;
    ++count.hits;
    // A guess pins nothing: it would keep memory from the window, which grows before the fetch that
    // rides on it.
    if (fetch.purpose == Purpose::kPrefetch) return true;
    cache_.pin(segment, wanted.entry);
    fetch.pinned.emplace_back(wanted.segment, wanted.entry);
    arrive(fetch.wanted, wanted, slot, resident);
    return true;
  });
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
// works on one half, the other fills. Prefetches together get a half, so that the step that is due
// never finds the arena full of guesses.
void Store::start_round(Fetch& fetch) {
  if (fetch.next_read == fetch.plan.reads.size()) return;
  auto round = std::make_unique<ReadRound>();
  round->first = round->last = fetch.next_read;
  uint64_t room = arena_.size() / 2;
  if (fetch.purpose == Purpose::kPrefetch) room -= std::min(room, prefetch_bytes_);
  uint64_t taken = 0;
  while (round->last < fetch.plan.reads.size()) {
    const Read& read = fetch.plan.reads[round->last];
    const uint64_t bytes = Arena::rounded(staged_bytes(fetch, read));
    const bool first = taken == 0 && fetch.purpose != Purpose::kPrefetch;
    if (!first && taken + bytes > room) break;
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
  if (fetch.purpose == Purpose::kPrefetch) prefetch_bytes_ += taken;
  round->bytes = taken;
  Traffic::Count& count = traffic_.of(fetch.purpose);
  for (size_t i = round->first; i < round->last; ++i) {
    const Read& read = fetch.plan.reads[i];
    fetch.started += read.count;
    count.read += read.count;
    ++count.requests;
    count.bytes += read.length;
    ++count.drive_requests[read.drive];
    count.drive_bytes[read.drive] += read.length;
  }
  fetch.next_read = round->last;
  fetch.in_flight = std::move(round);
}

}  // namespace swarm_kv
