// The operators' kernels on the calling thread alone.
#include "ops/cpu/threads.h"

namespace swarm_kv::cpu {

int64_t num_threads() { return 1; }

void parallel_for(int64_t begin, int64_t end, int64_t,
                  const std::function<void(int64_t, int64_t)>& body) {
  if (begin < end) body(begin, end);
}

}  // namespace swarm_kv::cpu
