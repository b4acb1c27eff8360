#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/coalesce.h"
#include "core/dedupe.h"
#include "core/drive_load.h"
#include "core/router.h"
#include "core/segment.h"

namespace swarm_kv {

// Bytes of one request at most, unless the staging memory is too small for it.
inline constexpr uint64_t kMaxRead = 1 << 20;

// One layer's step, from what its rows select to the requests that bring it (§6.1). An object that
// is used again keeps its memory.
struct Step {
  std::vector<Segment*> segments;  // those of all rows, each once
  WantedList wanted;               // entries that must be read
  std::vector<int32_t> chosen;     // per wanted entry: member position that is read
  std::vector<Piece> pieces;       // of these, sorted as coalesce() does
  std::vector<Read> reads;

  // Whether a row wants one of the entries that a request brings.
  bool has_takers(const Read& read) const;

  // A stage each: dedupe, minus fast memory, balance, coalesce. `minus(wanted)` removes what need
  // not be read. Requests grow up to `max_read` bytes.
  template <typename Minus>
  void plan(std::span<const Selection> rows, const Router& router, const DriveLoad& load,
            const std::vector<DriveShape>& drives, Minus minus, uint64_t max_read) {
    dedupe(segments, rows, router.unites(), wanted);
    minus(wanted);
    router.route(segments, wanted, load, chosen);
    locate_chosen();
    coalesce(pieces, drives, max_read, reads);
  }

 private:
  void locate_chosen();
};

}  // namespace swarm_kv
