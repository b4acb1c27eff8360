#pragma once

#include <cstddef>
#include <cstdint>

namespace swarm_kv::cuda {

// Cuts scratch memory into arrays, each aligned to 256 bytes. Without memory it measures how much
// is needed, and the arrays are null.
class Workspace {
 public:
  explicit Workspace(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <typename T>
  T* take(int64_t count) {
    T* array = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + used_);
    used_ += (static_cast<size_t>(count) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    return array;
  }

  size_t bytes() const { return used_; }

 private:
  static constexpr size_t kAlign = 256;

  char* const memory_;
  size_t used_ = 0;
};

}  // namespace swarm_kv::cuda
