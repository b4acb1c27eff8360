#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace swarm_kv::io {

// Memory for direct I/O. `alignment` is a power of two; throws std::bad_alloc.
inline std::shared_ptr<std::byte> allocate_aligned(std::size_t bytes, std::size_t alignment) {
  const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
  if (memory == nullptr) throw std::bad_alloc();
  return {static_cast<std::byte*>(memory), [](std::byte* p) { std::free(p); }};
}

}  // namespace swarm_kv::io
