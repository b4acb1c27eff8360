#pragma once

#include <array>
#include <deque>
#include <vector>

#include "core/device.h"

namespace swarm_kv {

// A device whose memory is the host's: for tests of what runs on devices, where there is none.
// kCompute is the calling thread, and uploads happen as late as the order of marks allows, so that
// a mark which is not waited for shows as wrong bytes.
class HostDevice : public Device {
 public:
  void allocate(int64_t bytes) override;
  std::byte* memory() const override { return memory_; }
  int ordinal() const override { return kHost; }
  void begin() override {}
  void upload(int64_t to, const std::byte* from, int64_t bytes) override;
  void move(int64_t to, int64_t from, int64_t bytes) override;
  void record(int mark, Queue queue) override;
  void follow(int mark, Queue queue) override;
  void await(int mark) override;

 private:
  struct Upload {
    int64_t to;
    const std::byte* from;
    int64_t bytes;
  };

  std::vector<std::byte> storage_;
  std::byte* memory_ = nullptr;
  std::deque<Upload> waiting_;
  int64_t entered_ = 0;                   // uploads since the beginning
  std::array<int64_t, kMarks> marked_{};  // of these, how many before each mark of kCopy
};

}  // namespace swarm_kv
