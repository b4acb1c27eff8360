#pragma once

#include <cstddef>
#include <cstdint>

#include "core/query_tile.h"

namespace swarm_kv {

// Which keys a tile's queries take: those whose probability has a bit pattern above threshold, and
// the first `ties` keys whose pattern equals it. Keys of probability 0 are never taken.
struct Selection {
  int32_t threshold[kTile];
  int32_t ties[kTile];
};

// Selects, for each query of `count` tiles, the `budget` eligible keys [first, eligible) of highest
// probability. probabilities [rows][kTile] of tile i start at probabilities + i * tile_stride;
// those of keys that are not eligible become 0. Values are >= 0. Uses several threads where there
// are many keys, unless the caller is in parallel_for already.
void select_top(const QueryTile* tiles, int64_t count, int64_t first, int32_t budget,
                float* probabilities, int64_t tile_stride, Selection* selections);

// Sets the bits of the selected keys. bits: where the tile's kTile bits of key 0 are; those of the
// next key follow row_bytes later. Other bits are neither read nor written, so that tiles may be
// done at once.
void set_bits(const QueryTile& tile, int64_t first, const float* probabilities,
              const Selection& selection, std::byte* bits, int64_t row_bytes);

}  // namespace swarm_kv
