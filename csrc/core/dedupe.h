#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/segment.h"

namespace swarm_kv {

// What one sequence of a batch asks of one layer in one step: a row. Entries and clusters are
// numbered through the row's segments in order.
struct Selection {
  std::span<const int32_t> segments;  // indices into the step's segments, each once
  std::span<const int64_t> clusters;  // taken whole
  std::span<const int64_t> entries;   // taken one by one
  int64_t limit = 0;                  // entries at or above it do not exist (a cropped sequence)
};

// A row that wants an entry, and the entry's number there.
struct Taker {
  int32_t row;
  int64_t id;
};

// One entry that the step needs.
struct Wanted {
  int32_t segment;  // index into the step's segments
  int32_t entry;    // within the segment
  // Member position of the copy to read unless the router finds a better one: what came with a
  // cluster is read there, next to its neighbours; what was taken alone, at kFirstCopy, which is
  // looked up for what is read only.
  int32_t position;
  int32_t first_taker;  // rows that it is delivered to: [first, first + count) of takers
  int32_t takers;
  bool repeat = false;  // another element brings this entry already: read again, delivered to none

  static constexpr int32_t kFirstCopy = -1;
  int32_t position_in(const Segment& segment) const {
    return position == kFirstCopy ? segment.routing.copies_of(entry).front() : position;
  }
};

struct WantedList {
  std::vector<Wanted> entries;
  std::vector<Taker> takers;
};

// Fills `wanted` with what the rows selected, ascending by segment and entry (Eq. 8 before the DRAM
// tier is subtracted). With `unite` each entry comes once, however many clusters and rows it was
// selected with; otherwise every further selection repeats it, each at the copy that was selected.
// Throws Error(kArgument) for a number out of range, a segment that a row
// names twice, and more than 65,535 rows or segments.
void dedupe(std::span<Segment* const> segments, std::span<const Selection> rows, bool unite,
            WantedList& wanted);

}  // namespace swarm_kv
