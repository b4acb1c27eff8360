#include "core/host_device.h"

#include <cstring>
#include <memory>

namespace swarm_kv {

void HostDevice::allocate(int64_t bytes) {
  constexpr size_t kAlign = 256;
  storage_.assign(bytes + kAlign, std::byte{0xff});  // NaN, until something comes
  size_t space = storage_.size();
  void* begin = storage_.data();
  memory_ = static_cast<std::byte*>(std::align(kAlign, bytes, begin, space));
}

void HostDevice::upload(int64_t to, const std::byte* from, int64_t bytes) {
  waiting_.push_back({to, from, bytes});
  ++entered_;
}

void HostDevice::move(int64_t to, int64_t from, int64_t bytes) {
  std::memmove(memory_ + to, memory_ + from, bytes);
}

// kCompute has always come to its end.
void HostDevice::record(int mark, Queue queue) { marked_[mark] = queue == kCopy ? entered_ : 0; }

void HostDevice::follow(int mark, Queue queue) {
  if (queue == kCompute) await(mark);
}

void HostDevice::await(int mark) {
  while (entered_ - static_cast<int64_t>(waiting_.size()) < marked_[mark]) {
    const Upload& next = waiting_.front();
    std::memcpy(memory_ + next.to, next.from, next.bytes);
    waiting_.pop_front();
  }
}

}  // namespace swarm_kv
