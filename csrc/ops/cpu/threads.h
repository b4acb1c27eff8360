#pragma once

#include <cstdint>
#include <functional>

namespace swarm_kv::cpu {

// The threads of whatever calls the kernels, who defines both functions: torch's in
// csrc/ops/threads.cpp. (core/parallel.h starts threads anew, which takes longer than a kernel.)

// Threads that parallel_for may use, the caller included.
int64_t num_threads();

// Calls body(first, last) on disjoint ranges of at least `grain` indices that cover [begin, end),
// maybe from several threads at once; returns when all are done.
void parallel_for(int64_t begin, int64_t end, int64_t grain,
                  const std::function<void(int64_t, int64_t)>& body);

}  // namespace swarm_kv::cpu
