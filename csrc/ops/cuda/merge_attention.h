#pragma once

#include <cstdint>

#include "ops/cuda/device.h"

namespace swarm_kv::cuda {

// The merge of two partial attentions (see merge_attention in swarm_kv/ops.py), enqueued on
// `stream`. out_* [rows, dim] and lse_* [rows] are contiguous device memory. Returns the launch's
// error.
cudaError_t merge_attention(const float* out_a, const float* lse_a, const float* out_b,
                            const float* lse_b, int64_t rows, int64_t dim, float* out, float* lse,
                            cudaStream_t stream);
cudaError_t merge_attention(const double* out_a, const double* lse_a, const double* out_b,
                            const double* lse_b, int64_t rows, int64_t dim, double* out,
                            double* lse, cudaStream_t stream);

}  // namespace swarm_kv::cuda
