#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/fetch.h"

namespace swarm_kv {

// What fetches moved, by purpose. Totals since the store opened, counted
// when reads start.
struct Traffic {
  struct Count {
    uint64_t fetches = 0;
    uint64_t wanted = 0;    // distinct entries asked for
    uint64_t hits = 0;      // of these, served by a cluster cache
    uint64_t read = 0;      // of these, read from the drives
    uint64_t requests = 0;  // reads after coalescing
    uint64_t bytes = 0;     // read, gaps and block rounding included
    uint64_t repaired = 0;  // entries served by another copy after a failure
    double wait_seconds = 0;
    std::vector<uint64_t> drive_requests;
    std::vector<uint64_t> drive_bytes;
  };
  std::array<Count, kPurposes> by_purpose;
  // What became of prefetches. Entries in flight or in the arena when a fetch rode on theirs are
  // used or wasted; those of a prefetch that was released are wasted.
  struct Ahead {
    uint64_t used = 0;    // entries
    uint64_t wasted = 0;  // entries
    uint64_t late = 0;    // entries that a fetch with a prefetch had to read itself
    uint64_t late_requests = 0;
    uint64_t late_bytes = 0;
  };
  Ahead ahead;
  uint64_t segments_written = 0;
  uint64_t written_bytes = 0;   // copies included
  uint64_t stored_bytes = 0;    // now on the drives
  uint64_t stored_entries = 0;  // now on the drives, each once
  uint64_t stored_copies = 0;   // now on the drives, replicas included

  Count& of(Purpose purpose) { return by_purpose[static_cast<int>(purpose)]; }
};

}  // namespace swarm_kv
