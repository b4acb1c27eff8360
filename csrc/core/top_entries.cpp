#include "core/top_entries.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>
#include <vector>

#include "core/parallel.h"
#include "core/simd.h"

namespace swarm_kv {
namespace {

// Keys of one tile that one thread looks at: 512 KiB, enough to outweigh starting it.
constexpr int64_t kRangeKeys = 8192;

struct Search {
  int32_t low[kTile] = {};
  int32_t high[kTile] = {};
  int32_t above[kTile] = {};  // keys above `high`
  int32_t middle[kTile] = {};
  int32_t count[kTile] = {};  // keys above `middle`

  bool done() const { return std::equal(low, low + kTile, high); }
};

SWARM_KV_CLONES void mask_and_max(const QueryTile& tile, int64_t first, int64_t last,
                                  float* probabilities, int32_t* result) {
  int32_t largest[kTile] = {};
  for (int64_t j = first; j < last; ++j) {
    float* row = probabilities + j * kTile;
    SWARM_KV_LANES(l, kTile) {
      row[l] = j < tile.eligible[l] ? row[l] : 0.0f;
      largest[l] = std::max(largest[l], std::bit_cast<int32_t>(row[l]));
    }
  }
  SWARM_KV_LANES(l, kTile) result[l] = largest[l];
}

SWARM_KV_CLONES void count_above(const float* probabilities, int64_t first, int64_t last,
                                 const int32_t* threshold, int32_t* result) {
  int32_t count[kTile] = {};
  for (int64_t j = first; j < last; ++j) {
    const float* row = probabilities + j * kTile;
    SWARM_KV_LANES(l, kTile) { count[l] += std::bit_cast<int32_t>(row[l]) > threshold[l] ? 1 : 0; }
  }
  SWARM_KV_LANES(l, kTile) result[l] = count[l];
}

// Halves the range of each query that is still searching; low = high ends a search.
void narrow(int32_t budget, Search& search) {
  SWARM_KV_LANES(l, kTile) {
    if (search.low[l] == search.high[l]) continue;
    if (search.count[l] > budget) {
      search.low[l] = search.middle[l] + 1;
    } else {
      search.high[l] = search.middle[l];
      search.above[l] = search.count[l];
      if (search.count[l] == budget) search.low[l] = search.middle[l];
    }
  }
}

// Calls body(tile index, first key, last key) on ranges of the tiles' eligible keys.
template <typename Body>
void for_ranges(const QueryTile* tiles, int64_t count, int64_t first, const Body& body) {
  int64_t last = first;
  for (int64_t i = 0; i < count; ++i) last = std::max<int64_t>(last, tiles[i].max_eligible);
  const int64_t ranges = (last - first + kRangeKeys - 1) / kRangeKeys;
  parallel_for(0, count * ranges, 1, [&](int64_t task, int64_t) {
    const int64_t tile = task / ranges;
    const int64_t begin = first + task % ranges * kRangeKeys;
    const int64_t end = std::min<int64_t>(begin + kRangeKeys, tiles[tile].max_eligible);
    if (begin < end) body(tile, begin, end);
  });
}

}  // namespace

// Probabilities are not negative, so their bit patterns order as they do: a search over patterns
// finds the exact threshold. Counts are integers, so the order in which threads add them is of no
// consequence.
void select_top(const QueryTile* tiles, int64_t count, int64_t first, int32_t budget,
                float* probabilities, int64_t tile_stride, Selection* selections) {
  std::vector<Search> searches(count);
  std::mutex mutex;
  for_ranges(tiles, count, first, [&](int64_t i, int64_t begin, int64_t end) {
    int32_t largest[kTile];
    mask_and_max(tiles[i], begin, end, probabilities + i * tile_stride, largest);
    const std::lock_guard lock(mutex);
    SWARM_KV_LANES(l, kTile) { searches[i].high[l] = std::max(searches[i].high[l], largest[l]); }
  });
  while (!std::all_of(searches.begin(), searches.end(), [](const Search& s) { return s.done(); })) {
    for (Search& search : searches) {
      SWARM_KV_LANES(l, kTile) {
        search.middle[l] = search.low[l] + (search.high[l] - search.low[l]) / 2;
        search.count[l] = 0;
      }
    }
    for_ranges(tiles, count, first, [&](int64_t i, int64_t begin, int64_t end) {
      if (searches[i].done()) return;
      int32_t above[kTile];
      count_above(probabilities + i * tile_stride, begin, end, searches[i].middle, above);
      const std::lock_guard lock(mutex);
      SWARM_KV_LANES(l, kTile) searches[i].count[l] += above[l];
    });
    for (Search& search : searches) narrow(budget, search);
  }
  for (int64_t i = 0; i < count; ++i) {
    const Search& search = searches[i];
    SWARM_KV_LANES(l, kTile) {
      selections[i].threshold[l] = search.high[l];
      selections[i].ties[l] = search.high[l] == 0 ? 0 : budget - search.above[l];
    }
  }
}

SWARM_KV_CLONES void set_bits(const QueryTile& tile, int64_t first, const float* probabilities,
                              const Selection& selection, std::byte* bits, int64_t row_bytes) {
  static_assert(kTile == 16, "a key's bits of one tile are a uint16_t");
  int32_t left[kTile];
  int32_t bit[kTile];
  SWARM_KV_LANES(l, kTile) {
    left[l] = selection.ties[l];
    bit[l] = 1 << l;
  }
  for (int64_t j = first; j < tile.max_eligible; ++j) {
    const float* row = probabilities + j * kTile;
    int32_t mask = 0;
    SWARM_KV_LANES(l, kTile) {
      const int32_t value = std::bit_cast<int32_t>(row[l]);
      const int32_t tie = (value == selection.threshold[l] ? 1 : 0) & (left[l] > 0 ? 1 : 0);
      left[l] -= tie;
      mask |= (value > selection.threshold[l] ? bit[l] : 0) | (-tie & bit[l]);
    }
    if (mask == 0) continue;
    uint16_t word;
    std::memcpy(&word, bits + j * row_bytes, sizeof(word));
    word = static_cast<uint16_t>(word | mask);
    std::memcpy(bits + j * row_bytes, &word, sizeof(word));
  }
}

}  // namespace swarm_kv
