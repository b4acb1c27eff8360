#include "ops/cuda/merge_attention.h"

namespace swarm_kv::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kWarpsPerBlock = 4;
constexpr int64_t kMaxBlocks = 65535;

// One warp per row: the weights are recomputed by every lane, which is cheaper than sharing them.
template <typename Acc>
__global__ void merge_rows(const Acc* out_a, const Acc* lse_a, const Acc* out_b, const Acc* lse_b,
                           int64_t rows, int64_t dim, Acc* out, Acc* lse) {
  const int lane = threadIdx.x % kWarp;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarpsPerBlock;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp;
       row < rows; row += step) {
    const Acc a = lse_a[row];
    const Acc b = lse_b[row];
    const Acc greater = a < b ? b : a;
    // Relative to -inf every exponential would be inf - inf.
    const Acc shift = greater == -static_cast<Acc>(INFINITY) ? Acc(0) : greater;
    const Acc weight_a = exp(a - shift);
    const Acc weight_b = exp(b - shift);
    const Acc sum = weight_a + weight_b;
    const Acc inverse = sum == Acc(0) ? Acc(0) : Acc(1) / sum;
    for (int64_t d = lane; d < dim; d += kWarp) {
      const int64_t i = row * dim + d;
      out[i] = inverse * (weight_a * out_a[i] + weight_b * out_b[i]);
    }
    if (lane == 0) lse[row] = shift + log(sum);
  }
}

template <typename Acc>
cudaError_t merge(const Acc* out_a, const Acc* lse_a, const Acc* out_b, const Acc* lse_b,
                  int64_t rows, int64_t dim, Acc* out, Acc* lse, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  const int64_t needed = (rows + kWarpsPerBlock - 1) / kWarpsPerBlock;
  const unsigned blocks = static_cast<unsigned>(needed < kMaxBlocks ? needed : kMaxBlocks);
  return cuda::launch(merge_rows<Acc>, blocks, kWarp * kWarpsPerBlock, 0, stream, out_a, lse_a,
                      out_b, lse_b, rows, dim, out, lse);
}

}  // namespace

cudaError_t merge_attention(const float* out_a, const float* lse_a, const float* out_b,
                            const float* lse_b, int64_t rows, int64_t dim, float* out, float* lse,
                            cudaStream_t stream) {
  return merge(out_a, lse_a, out_b, lse_b, rows, dim, out, lse, stream);
}

cudaError_t merge_attention(const double* out_a, const double* lse_a, const double* out_b,
                            const double* lse_b, int64_t rows, int64_t dim, double* out,
                            double* lse, cudaStream_t stream) {
  return merge(out_a, lse_a, out_b, lse_b, rows, dim, out, lse, stream);
}

}  // namespace swarm_kv::cuda
