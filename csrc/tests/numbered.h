// Entries that tell which one they are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/entry_source.h"

namespace swarm_kv {

inline constexpr int64_t kHeadBytes = 256;
inline constexpr int64_t kEntryBytes =
    2 * kHeadBytes;  // one block: requests can be counted in bytes

// Entry n is filled with its number, shifted by `shift`.
struct Numbered {
  std::vector<int32_t> halves;
  int64_t shift;

  Numbered(int64_t count, int64_t first = 0) : halves(count * kHeadBytes / 4), shift(first) {
    for (int64_t n = 0; n < count; ++n) {
      std::fill_n(&halves[n * kHeadBytes / 4], kHeadBytes / 4, static_cast<int32_t>(n + shift));
    }
  }
  EntrySource source() const {
    const auto* base = reinterpret_cast<const std::byte*>(halves.data());
    const EntrySource::Half half{base, 0, kHeadBytes};
    return {half, half, 1, kHeadBytes};
  }
};

// The number through a row's segments is the number that the entry is filled with, plus an offset.
struct Pattern {
  int64_t offset = 0;
  bool matches(int64_t id, const std::byte* entry) const {
    std::vector<int32_t> expected(kEntryBytes / 4, static_cast<int32_t>(id + offset));
    return std::memcmp(expected.data(), entry, kEntryBytes) == 0;
  }
};

}  // namespace swarm_kv
