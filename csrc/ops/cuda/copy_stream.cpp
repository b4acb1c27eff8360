#include "ops/cuda/copy_stream.h"

#include <stdexcept>
#include <string>

#include "io/error.h"

namespace swarm_kv::cuda {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next one to ask would get it, too
  throw std::runtime_error(std::string("swarm_kv: ") + what +
                           " failed on the GPU: " + cudaGetErrorString(error));
}

}  // namespace

CopyStream::CopyStream(int ordinal) : ordinal_(ordinal) {
  try {
    check(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking), "a stream for copies");
    for (cudaEvent_t& event : events_) {
      check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event");
    }
  } catch (...) {
    destroy();
    throw;
  }
}

CopyStream::~CopyStream() { destroy(); }

void CopyStream::finish() const {
  for (const cudaEvent_t event : events_) {
    if (event != nullptr) cudaEventSynchronize(event);
  }
  if (copies_ != nullptr) cudaStreamSynchronize(copies_);
}

void CopyStream::destroy() {
  finish();
  for (const cudaEvent_t event : events_) {
    if (event != nullptr) cudaEventDestroy(event);
  }
  if (copies_ != nullptr) cudaStreamDestroy(copies_);
}

void CopyStream::compute_in(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "asking for a graph");
  if (status != cudaStreamCaptureStatusNone) {
    throw Error(ErrorKind::kState,
                "a decoding step cannot be captured in a CUDA graph, since what it reads differs "
                "from step to step: call it outside of the graph");
  }
  compute_ = stream;
}

void CopyStream::upload(int64_t to, const std::byte* from, int64_t bytes) {
  check(cudaMemcpyAsync(memory_ + to, from, bytes, cudaMemcpyHostToDevice, copies_), "a copy");
}

void CopyStream::move(int64_t to, int64_t from, int64_t bytes) {
  check(cudaMemcpyAsync(memory_ + to, memory_ + from, bytes, cudaMemcpyDeviceToDevice, compute_),
        "a copy");
}

void CopyStream::record(int mark, Queue queue) {
  check(cudaEventRecord(events_[mark], stream_of(queue)), "recording an event");
}

void CopyStream::follow(int mark, Queue queue) {
  check(cudaStreamWaitEvent(stream_of(queue), events_[mark], 0), "waiting for an event");
}

void CopyStream::await(int mark) {
  check(cudaEventSynchronize(events_[mark]), "waiting for an event");
}

}  // namespace swarm_kv::cuda
