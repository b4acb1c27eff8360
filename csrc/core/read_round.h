#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/entry_pool.h"
#include "io/batch.h"

namespace swarm_kv {

struct ArenaRange {
  uint64_t offset;
  uint64_t bytes;
};

// Arena memory of reads that a hung drive would not let go of, once it has. Filled by the threads
// that reap its answer, emptied by the store.
class LateRanges {
 public:
  void add(const std::vector<ArenaRange>& ranges);
  // Moves what has come back to `ranges`.
  void take(std::vector<ArenaRange>& ranges);

 private:
  std::mutex mutex_;
  std::vector<ArenaRange> ranges_;
};

// What reads in flight hold: the region, and the memory that goes to LateRanges when the last of
// those that were given up has ended.
struct Lease {
  std::shared_ptr<Region> region;
  std::shared_ptr<LateRanges> late;
  std::vector<ArenaRange> given_up;

  ~Lease() { late->add(given_up); }
};

// Reads that are in the arena together. The memory of a read holds what it reads and, behind that,
// the decoded entries where they are stored in code.
struct ReadRound {
  size_t first = 0;  // [first, last) of Step::reads
  size_t last = 0;
  std::vector<uint64_t> place;     // per read where its memory begins, and the end of all
  std::vector<double> due;         // per read: seconds from its start to its end, by DriveLoad
  size_t awaited = 0;              // reads that have not arrived and are wanted
  std::vector<ArenaRange> refuge;  // memory in the stead of what was given up
  std::shared_ptr<Lease> lease;
  io::Batch batch;

  bool holds_memory() const { return !place.empty(); }
  uint64_t bytes() const { return place.back() - place.front(); }
};

}  // namespace swarm_kv
