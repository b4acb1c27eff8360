// Finding fetches, and ending them.
#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/store.h"
#include "io/error.h"

namespace swarm_kv {

void Store::release_ticket(int64_t id) {
  Lock lock(mutex_);
  const auto found = find_ticket(id);
  if ((*found)->busy) {
    (*found)->released = true;
    arena_released_.notify_all();
  } else {
    end(lock, **found);
  }
}

// Ends a fetch: nobody finds it any more, its reads are cancelled, and what it holds is given back.
void Store::end(Lock& lock, Fetch& fetch) {
  std::unique_ptr<Fetch> mine = take_ticket(fetch);
  ++ending_;
  lock.unlock();
  for (Fetch* each = mine.get(); each != nullptr; each = each->ahead.get()) cancel(*each);
  lock.lock();
  --ending_;
  if (mine->purpose == Purpose::kPrefetch) traffic_.ahead.wasted += mine->started;
  if (mine->ahead) give_back(std::move(mine->ahead));
  give_back(std::move(mine));
}

void Store::cancel(Fetch& fetch) {
  for (ReadRound& round : fetch.rounds) round.batch.cancel();
}

void Store::give_back(std::unique_ptr<Fetch> fetch) {
  for (ReadRound& round : fetch->rounds) release_round(*fetch, round);
  for (const auto& [segment, entry] : fetch->pinned) {
    cache_.foresee(*fetch->segments[segment], entry);
  }
  for (const auto& [segment, entry] : fetch->pinned) {
    cache_.unpin(*fetch->segments[segment], entry);
  }
  for (const int64_t segment : fetch->segment_ids) {
    Held& record = segments_.at(segment);
    if (--record.fetches == 0 && record.doomed) destroy_segment(segment);
  }
  fetch->clear();
  idle_.push_back(std::move(fetch));
}

// Nothing of the round is in flight, unless it was given up.
void Store::release_round(const Fetch& fetch, ReadRound& round) {
  if (!round.holds_memory()) return;
  for (auto rest = round.batch.take({}); !rest.empty(); rest = round.batch.take({})) {
    for (const uint32_t index : rest) load_.drop(fetch.step.reads[round.first + index]);
  }
  if (fetch.purpose == Purpose::kPrefetch) prefetch_bytes_ -= round.bytes();
  for (const ArenaRange& range : round.refuge) arena_.release(range.offset, range.bytes);
  round.refuge.clear();
  if (round.batch.gave_up()) {
    for (uint32_t index = 0; index + 1 < round.place.size(); ++index) {
      const ArenaRange own{round.place[index], round.place[index + 1] - round.place[index]};
      if (round.batch.error(index) == ETIMEDOUT) {
        round.lease->given_up.push_back(own);
      } else {
        arena_.release(own.offset, own.bytes);
      }
    }
    round.lease.reset();  // the reads in flight hold it
  } else {
    arena_.release(round.place.front(), round.bytes());
  }
  round.place.clear();
  round.awaited = 0;
  arena_released_.notify_all();
}

std::vector<std::unique_ptr<Fetch>>::iterator Store::find_ticket(int64_t id) {
  const auto found = std::ranges::lower_bound(tickets_, id, {}, &Fetch::ticket);
  if (found == tickets_.end() || (*found)->ticket != id) {
    throw Error(ErrorKind::kState, "ticket " + std::to_string(id) +
                                       " does not exist: it was released, or its fetch failed");
  }
  return found;
}

Fetch& Store::ticket(int64_t id) {
  Fetch& fetch = **find_ticket(id);
  if (fetch.busy) {
    throw Error(ErrorKind::kState,
                "ticket " + std::to_string(id) + " is being waited for by another thread");
  }
  return fetch;
}

std::unique_ptr<Fetch> Store::take_ticket(const Fetch& fetch) {
  const auto found = find_ticket(fetch.ticket);
  std::unique_ptr<Fetch> taken = std::move(*found);
  tickets_.erase(found);
  return taken;
}

std::unique_ptr<Fetch> Store::idle_fetch() {
  if (idle_.empty()) idle_.push_back(std::make_unique<Fetch>());
  std::unique_ptr<Fetch> fetch = std::move(idle_.back());
  idle_.pop_back();
  fetch->owner = std::this_thread::get_id();
  return fetch;
}

}  // namespace swarm_kv
