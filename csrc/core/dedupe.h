#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/segment.h"

namespace swarm_kv {

// What one layer of one sequence asks of the drives in one step. Entries and clusters are numbered
// through all of the layer's segments in order.
struct Selection {
  std::vector<Segment*> segments;
  std::span<const int64_t> clusters;  // taken whole
  std::span<const int64_t> entries;   // taken one by one
  int64_t limit = 0;                  // entries at or above it do not exist (a cropped sequence)
};

// One entry that the step needs, once, however many clusters it was selected with.
struct Wanted {
  int32_t segment;  // index into Selection::segments
  int32_t entry;    // within the segment
  int64_t id;       // through all segments
  // Copies that may serve it: [first, first + count) of WantedList::candidates. An entry that came
  // with clusters is read there, next to its neighbours; one taken alone may come from anywhere.
  int32_t first_candidate;
  int32_t candidates;
};

struct Candidate {
  int32_t position;  // member position of the segment
  int32_t group;     // group_of(position): what is read together with it
};

struct WantedList {
  std::vector<Wanted> entries;
  std::vector<Candidate> candidates;
};

// The union of the selected clusters and entries, ascending by id (Eq. 8 before the DRAM tier is
// subtracted). Throws Error(kArgument) for a number out of range.
WantedList dedupe(const Selection& selection);

}  // namespace swarm_kv
