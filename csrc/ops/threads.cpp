#include "ops/cpu/threads.h"

#include <torch/csrc/stable/ops.h>

namespace swarm_kv::cpu {

int64_t num_threads() { return torch::stable::get_num_threads(); }

void parallel_for(int64_t begin, int64_t end, int64_t grain,
                  const std::function<void(int64_t, int64_t)>& body) {
  torch::stable::parallel_for(begin, end, grain, body);
}

}  // namespace swarm_kv::cpu
