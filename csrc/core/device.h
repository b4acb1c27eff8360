#pragma once

#include <cstddef>
#include <cstdint>

namespace swarm_kv {

// Memory that attention reads in the host's stead, and what is done to it. Two queues run behind
// the host's back, each in its order and beside the other one. Marks, small numbers, order them: a
// mark stands for all that was in a queue when it was recorded last, and for nothing before that.
// What fails throws std::runtime_error. Not thread-safe.
class Device {
 public:
  enum Queue { kCompute, kCopy };

  virtual ~Device() = default;

  // Once, before anything else.
  virtual void allocate(int64_t bytes) = 0;
  // Where the memory begins, aligned to 256 bytes. For what runs on the device, not for the host.
  virtual std::byte* memory() const = 0;

  // Ordinal of the CUDA device; kHost for the host's own memory.
  virtual int ordinal() const = 0;

  // From now on kCompute is where the caller computes. Throws Error(kState) where nothing can be
  // ordered against that, as while a CUDA graph is captured; then nothing has changed.
  virtual void begin() = 0;

  // In kCopy: copies from memory of the host, which must stay as it is until that has happened.
  virtual void upload(int64_t to, const std::byte* from, int64_t bytes) = 0;
  // In kCompute: copies within the memory.
  virtual void move(int64_t to, int64_t from, int64_t bytes) = 0;

  virtual void record(int mark, Queue queue) = 0;
  // What enters the queue from now on waits for the mark.
  virtual void follow(int mark, Queue queue) = 0;
  // The host waits for the mark, and for nothing else.
  virtual void await(int mark) = 0;

  static constexpr int kMarks = 8;
  static constexpr int kHost = -1;
};

}  // namespace swarm_kv
