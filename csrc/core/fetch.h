#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "core/dedupe.h"
#include "core/read_round.h"
#include "core/segment.h"
#include "core/step.h"

namespace swarm_kv {

// Why entries are read. Decoding steps count as activations; what they read, and what was read
// ahead for them, is offered to the cluster cache. Streaming passes over a whole context would wash
// it out.
enum class Purpose : int { kDecode, kStream, kPrefetch };
inline constexpr int kPurposes = 3;

std::string_view name_of(Purpose purpose);
// Throws Error(kArgument) listing the names.
Purpose purpose_of(std::string_view name);

// What one sequence of a batch asks of one layer: handles of its segments, whose clusters and
// entries are numbered through, and which of them. Entries at or above `limit` do not exist.
struct Row {
  std::span<const int64_t> segments;
  std::span<const int64_t> clusters;
  std::span<const int64_t> entries;
  int64_t limit = 0;
};

// Entries in fast memory, by row: row r has [rows[r], rows[r + 1]).
struct Delivery {
  std::vector<int64_t> ids;    // entry numbers through all segments of the row
  std::vector<int64_t> slots;  // byte offsets in the pool
  std::vector<int64_t> rows;
};

struct Arrival {
  Taker taker;
  int64_t slot;
};
// Appends the arrival of an entry at each row that wants it.
void arrive(const WantedList& list, const Wanted& wanted, int64_t slot,
            std::vector<Arrival>& arrivals);
// Sorts arrivals by row.
void deliver(std::span<const Arrival> arrivals, size_t rows, Delivery& delivery);

// One outstanding fetch, from submit to release. Objects are used again and keep their memory.
struct Fetch {
  // Where the entry of a piece lies: its slot, or one of these.
  enum : int64_t { kNotStarted = -2, kInFlight = -1 };

  int64_t ticket = 0;
  Purpose purpose = Purpose::kDecode;
  std::thread::id owner;  // the thread that submitted it
  size_t rows = 0;
  std::vector<int64_t> segment_ids;
  std::vector<std::shared_ptr<Segment>> segments;
  std::vector<std::pair<int32_t, int32_t>> pinned;  // (segment index, entry)
  Step step;                   // its entries are what is neither in the cache nor read ahead
  std::vector<int64_t> slots;  // per piece
  size_t next_read = 0;        // what was not started begins here
  int64_t started = 0;         // entries whose reads were started
  std::array<ReadRound, 3> rounds;
  ReadRound* arriving = &rounds[0];
  ReadRound* following = &rounds[1];  // in flight too, so that no drive waits for the slowest one
  ReadRound* delivered = &rounds[2];  // its slots are in the caller's hands, until the next
  // The prefetch that this fetch rides on; its entries name takers in this fetch's list, and its
  // slots last until the end.
  std::unique_ptr<Fetch> ahead;
  bool busy = false;              // a thread works on it without the store's lock
  bool starving = false;          // a thread is blocked because the arena is held by others
  bool released = false;          // while busy: that thread ends it
  std::vector<Arrival> arrivals;  // of the part that is taken
  uint64_t repaired = 0;          // entries of it

  Fetch() = default;
  Fetch(const Fetch&) = delete;
  Fetch& operator=(const Fetch&) = delete;

  bool all_started() const { return next_read == step.reads.size(); }
  bool holds_memory() const;
  void clear();
};

}  // namespace swarm_kv
