#pragma once

#include <cstdint>
#include <functional>

namespace swarm_kv {

// Plain std::thread parallelism: a second OpenMP runtime beside torch's would oversubscribe or
// clash. Threads live only for the duration of one call, so a process may fork between calls.

// Threads that parallel_for may use, the caller included. Starts as
// std::thread::hardware_concurrency.
int num_threads();

// Sets num_threads() for the whole process. Throws Error(kArgument) if `threads` < 1.
void set_num_threads(int threads);

// Calls body(first, last) on disjoint ranges of at most `grain` indices that cover [begin, end),
// from several threads at once; returns when all are done. Ranges start at begin + n * grain
// whatever the number of threads, so a result that depends only on its range does not depend on the
// thread count. A nested call runs on the calling thread alone. After the first exception no new
// range starts, and that exception is rethrown here. An empty range calls nothing. Throws
// Error(kArgument) if `grain` < 1.
void parallel_for(int64_t begin, int64_t end, int64_t grain,
                  const std::function<void(int64_t, int64_t)>& body);

}  // namespace swarm_kv
