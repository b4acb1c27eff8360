#include "ops/cuda/emulation/runtime.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

struct CUevent_st {
  uint64_t recorded = 0;  // how often
  uint64_t reached = 0;   // the last record that a stream has come to
};

struct CUstream_st {
  struct Task {
    std::function<bool()> ready;
    std::function<void()> run;
  };
  std::deque<Task> tasks;
  uint64_t rank = 0;
  bool capturing = false;
};

namespace swarm_kv::cuda::emulation {
namespace {

struct Device {
  std::vector<CUstream_st*> streams;
  std::mt19937_64 random;
  bool late = true;
  bool ranked = false;
};

Device& device() {
  static Device instance;
  return instance;
}

// Runs one piece of work of those that can; false when there is none.
bool run_one() {
  std::vector<CUstream_st*> able;
  for (CUstream_st* stream : device().streams) {
    if (!stream->tasks.empty() && stream->tasks.front().ready()) able.push_back(stream);
  }
  if (able.empty()) return false;
  CUstream_st* chosen = able[device().random() % able.size()];
  if (device().ranked) {
    chosen = *std::ranges::max_element(able, {}, &CUstream_st::rank);
  }
  const auto task = std::move(chosen->tasks.front());
  chosen->tasks.pop_front();
  task.run();
  return true;
}

void run_some() {
  if (device().late) return;
  for (uint64_t count = device().random() % 4; count > 0 && run_one(); --count) {
  }
}

void run_until(const std::function<bool()>& reached) {
  while (!reached()) {
    if (!run_one()) throw std::runtime_error("emulation: the host waits for what cannot happen");
  }
}

cudaError_t add(
    cudaStream_t stream, std::function<void()> run,
    std::function<bool()> ready = [] { return true; }) {
  stream->tasks.push_back({std::move(ready), std::move(run)});
  run_some();
  return cudaSuccess;
}

}  // namespace

void set_stream_seed(uint64_t seed) {
  device().random.seed(seed);
  device().late = seed % 2 == 0;
  device().ranked = seed / 2 % 2 == 0;
  for (CUstream_st* stream : device().streams) stream->rank = device().random();
}

void enqueue(cudaStream_t stream, std::function<void()> work) { add(stream, std::move(work)); }

void set_capturing(cudaStream_t stream, bool capturing) { stream->capturing = capturing; }

void finish() {
  while (run_one()) {
  }
}

}  // namespace swarm_kv::cuda::emulation

using namespace swarm_kv::cuda::emulation;

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new CUstream_st;
  (*stream)->rank = device().random();
  device().streams.push_back(*stream);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  cudaStreamSynchronize(stream);
  std::erase(device().streams, stream);
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  run_until([stream] { return stream->tasks.empty(); });
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return add(stream, [] {}, [event, record = event->recorded] { return event->reached >= record; });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = stream->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return add(stream, [event, record = ++event->recorded] {
    event->reached = std::max(event->reached, record);
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  run_until([event, record = event->recorded] { return event->reached >= record; });
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  return add(stream, [=] { std::memcpy(target, source, bytes); });
}

cudaError_t cudaGetLastError() { return cudaSuccess; }

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "invalid argument";
}
