#include "core/step.h"

#include <algorithm>

namespace swarm_kv {

bool Step::has_takers(const Read& read) const {
  const auto held = std::span(pieces).subspan(read.first, read.count);
  return std::ranges::any_of(
      held, [&](const Piece& piece) { return wanted.entries[piece.wanted].takers > 0; });
}

void Step::locate_chosen() {
  pieces.clear();
  for (size_t i = 0; i < chosen.size(); ++i) {
    const Segment& segment = *segments[wanted.entries[i].segment];
    pieces.push_back({segment.placement.drive[chosen[i]], segment.offset_of(chosen[i]),
                      static_cast<uint64_t>(segment.entry_bytes), static_cast<int32_t>(i)});
  }
}

}  // namespace swarm_kv
