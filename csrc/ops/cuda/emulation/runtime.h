// The calls of the CUDA runtime that copy and put in order, on the host, for tests: what
// ops/cuda/copy_stream.h uses. Streams are queues of work that runs late: with every call some of
// it, chosen at random among what events allow, and what is waited for. So a wait that is missing
// gives wrong bytes for some seeds. All calls come from one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "ops/cuda/emulation/emulation.h"

using cudaEvent_t = struct CUevent_st*;

enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToDevice = 3 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
inline constexpr unsigned cudaStreamNonBlocking = 1;
inline constexpr unsigned cudaEventDisableTiming = 2;

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t error);

namespace swarm_kv::cuda::emulation {

// The order in which streams run, until it is set anew. With even seeds nothing runs before it is
// waited for; with half of the even and of the odd ones each stream has a rank, and the highest
// that can goes on.
void set_stream_seed(uint64_t seed);

// Work of a kernel's kind.
void enqueue(cudaStream_t stream, std::function<void()> work);

// Whether a graph is captured in the stream.
void set_capturing(cudaStream_t stream, bool capturing);

// Runs all that is left.
void finish();

}  // namespace swarm_kv::cuda::emulation
