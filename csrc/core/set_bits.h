#pragma once

#include <bit>
#include <cstdint>

namespace swarm_kv {

// Calls function(query) for each query whose bit is set in a signature, ascending.
template <typename Function>
void for_each_query(const uint64_t* row, int64_t words, Function function) {
  for (int64_t w = 0; w < words; ++w) {
    for (uint64_t rest = row[w]; rest != 0; rest &= rest - 1) {
      function(w * 64 + std::countr_zero(rest));
    }
  }
}

}  // namespace swarm_kv
