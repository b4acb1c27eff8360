#pragma once

#include <array>

#include "core/device.h"
#include "ops/cuda/runtime.h"

namespace swarm_kv::cuda {

// The queues and marks of a Device on a GPU: a stream of its own for copies, an event for each
// mark. The memory and the stream that computes come from whoever derives from it. Nothing here
// waits for the whole GPU.
class CopyStream : public Device {
 public:
  // On the current device, which is `ordinal`.
  explicit CopyStream(int ordinal);
  ~CopyStream() override;
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;

  int ordinal() const override { return ordinal_; }
  std::byte* memory() const override { return memory_; }

  void upload(int64_t to, const std::byte* from, int64_t bytes) override;
  void move(int64_t to, int64_t from, int64_t bytes) override;
  void record(int mark, Queue queue) override;
  void follow(int mark, Queue queue) override;
  void await(int mark) override;

 protected:
  void set_memory(void* memory) { memory_ = static_cast<std::byte*>(memory); }
  // What begin() does. Throws while a CUDA graph is captured in the stream.
  void compute_in(cudaStream_t stream);
  // Waits for what it was given; before the memory goes.
  void finish() const;

 private:
  cudaStream_t stream_of(Queue queue) const { return queue == kCopy ? copies_ : compute_; }
  void destroy();

  const int ordinal_;
  std::byte* memory_ = nullptr;
  cudaStream_t compute_ = nullptr;
  cudaStream_t copies_ = nullptr;
  std::array<cudaEvent_t, kMarks> events_{};
};

}  // namespace swarm_kv::cuda
