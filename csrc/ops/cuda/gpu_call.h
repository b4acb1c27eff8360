#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <cstring>
#include <initializer_list>
#include <stdexcept>

#include "ops/tensors.h"

namespace swarm_kv::ops {

// One call of an operator on the CUDA device of a tensor, which is the current device meanwhile.
class GpuCall {
 public:
  GpuCall(const char* op, const Tensor& tensor)
      : op_(op), tensor_(tensor), guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  // torch's current stream.
  cudaStream_t stream() const { return stream_; }

  // Uninitialised, on the device.
  Tensor empty(std::initializer_list<int64_t> sizes, ScalarType dtype) const {
    return torch::stable::new_empty(tensor_, {sizes.begin(), sizes.size()}, dtype);
  }
  Tensor bytes(size_t count) const {
    return empty({static_cast<int64_t>(count)}, ScalarType::Byte);
  }

  // Throws where a launch failed.
  void check(cudaError_t error) const {
    if (error != cudaSuccess) {
      throw std::runtime_error(concat(op_, ": CUDA launch failed: ", cudaGetErrorString(error)));
    }
  }

  // Throws while a CUDA graph is captured: for operators that read values on the host.
  void refuse_capture() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream_, &status));
    ops::check(
        status == cudaStreamCaptureStatusNone, op_,
        ": cannot be captured in a CUDA graph, since the host checks values on the way; call "
        "it outside of the graph");
  }

  // Waits for the stream and copies a T from the start of `tensor`.
  template <typename T>
  T read(const Tensor& tensor) const {
    const Tensor copy =
        torch::stable::to(tensor, torch::stable::Device(torch::headeronly::DeviceType::CPU));
    T value;
    std::memcpy(&value, copy.const_data_ptr(), sizeof(T));
    return value;
  }

 private:
  const char* const op_;
  const Tensor tensor_;
  const torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

// The tensor as kernels read it, whose element is not float64.
inline Tensor as_device_floats(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Double ? torch::stable::to(tensor, ScalarType::Float)
                                                    : tensor;
}

}  // namespace swarm_kv::ops
