#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "core/dedupe.h"
#include "core/read_plan.h"
#include "core/segment.h"
#include "io/batch.h"

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

// Reads that fit the arena together. A read's memory holds what it reads and, behind that, the
// decoded entries where they are stored in code.
struct ReadRound {
  size_t first = 0;  // [first, last) of ReadPlan::reads
  size_t last = 0;
  uint64_t bytes = 0;                  // of the arena
  std::vector<uint64_t> arena_offset;  // one per read
  std::vector<int64_t> slots;          // one per piece of the reads, once they have arrived
  io::Batch batch;
};

// One outstanding fetch, from submit to release.
struct Fetch {
  Purpose purpose = Purpose::kDecode;
  size_t rows = 0;
  std::vector<int64_t> segment_ids;
  std::vector<std::shared_ptr<Segment>> segments;
  WantedList wanted;  // only what is not in the cache nor read ahead
  ReadPlan plan;
  size_t next_read = 0;
  std::unique_ptr<ReadRound> in_flight;
  std::unique_ptr<ReadRound> delivered;  // its slots are in the caller's hands, until the next
  std::unique_ptr<ReadRound> lasting;    // the same, until the end
  int64_t started = 0;                   // entries whose reads were started
  // The prefetch that this fetch rides on; its entries name takers in this fetch's list.
  std::unique_ptr<Fetch> ahead;
  std::vector<std::pair<int32_t, int32_t>> pinned;     // (segment index, entry)
  std::thread::id owner = std::this_thread::get_id();  // the thread that submitted it
  bool waiting = false;                                // a thread is inside wait()

  bool holds_memory() const {
    return in_flight || delivered || lasting || (ahead && ahead->holds_memory());
  }
  std::vector<Segment*> segment_pointers() const {
    std::vector<Segment*> pointers;
    for (const auto& segment : segments) pointers.push_back(segment.get());
    return pointers;
  }
};

}  // namespace swarm_kv
