#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/dedupe.h"
#include "core/drive_load.h"

namespace swarm_kv {

// Evens out what was routed: while one drive would finish later than the others, entries move from
// it to copies that other drives hold, in any cluster. Moves begin at the ends of its reads, where
// leaving an entry out saves its transfer; those that save as much as they cost come first. Nothing
// moves where the last drive is late by less than such a plan takes to make. `chosen` holds a
// member position per entry of `wanted`.
void rebalance(std::span<Segment* const> segments, const WantedList& wanted,
               const DriveLoad& drives, std::vector<int32_t>& chosen);

}  // namespace swarm_kv
