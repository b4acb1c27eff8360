#pragma once

#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "core/dedupe.h"
#include "core/read_plan.h"
#include "core/segment.h"
#include "io/batch.h"

namespace swarm_kv {

// Why entries are read. Only decoding steps count as activations and fill the cluster cache;
// streaming passes over a whole context would wash it out.
enum class Purpose : int { kDecode, kStream };
inline constexpr int kPurposes = 2;

struct Fetched {
  std::vector<int64_t> ids;    // entry numbers through all segments of the layer
  std::vector<int64_t> slots;  // byte offsets in the pool
};

// Reads that fit the arena together. A read's memory holds what it reads and, behind that, the
// decoded entries where they are stored in code.
struct ReadRound {
  size_t first = 0;  // [first, last) of ReadPlan::reads
  size_t last = 0;
  std::vector<uint64_t> arena_offset;  // one per read
  std::vector<int64_t> slots;          // one per piece of the reads, once they have arrived
  io::Batch batch;
};

// One outstanding fetch, from submit to release.
struct Fetch {
  Purpose purpose = Purpose::kDecode;
  std::vector<int64_t> segment_ids;
  std::vector<std::shared_ptr<Segment>> segments;
  WantedList wanted;  // only what is not in the cache
  ReadPlan plan;
  size_t next_read = 0;
  std::unique_ptr<ReadRound> in_flight;
  std::unique_ptr<ReadRound> delivered;                // its slots are in the caller's hands
  std::vector<std::pair<int32_t, int32_t>> pinned;     // (segment index, entry)
  std::thread::id owner = std::this_thread::get_id();  // the thread that submitted it
  bool waiting = false;                                // a thread is inside wait()

  std::vector<Segment*> segment_pointers() const {
    std::vector<Segment*> pointers;
    for (const auto& segment : segments) pointers.push_back(segment.get());
    return pointers;
  }
};

}  // namespace swarm_kv
