#pragma once

#include <cstdint>
#include <vector>

#include "core/coalesce.h"
#include "core/dedupe.h"
#include "core/router.h"

namespace swarm_kv {

// Bytes of one request at most, unless the staging memory is too small for it.
inline constexpr uint64_t kMaxRead = 1 << 20;

// Which copies a step reads, and with which requests.
struct ReadPlan {
  std::vector<int32_t> chosen;  // per wanted entry: member position that is read
  std::vector<Piece> pieces;    // sorted by drive and offset
  std::vector<Read> reads;
};

// Balances and coalesces; `max_read` in bytes.
ReadPlan plan_reads(const std::vector<Segment*>& segments, const WantedList& wanted,
                    const Router& router, const std::vector<DriveShape>& drives, uint64_t max_read);

}  // namespace swarm_kv
