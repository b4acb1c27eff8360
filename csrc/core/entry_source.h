#pragma once

#include <cstddef>
#include <cstdint>

namespace swarm_kv {

// Type of an entry's numbers.
enum class Element { kFloat16, kBFloat16, kFloat32, kFloat64 };

int64_t size_of(Element element);
void to_float(Element element, const std::byte* source, float* destination, int64_t count);
void from_float(Element element, const float* source, std::byte* destination, int64_t count);

// Where the keys and values of a segment's entries lie in the caller's memory: head h of entry n
// starts `h * head_stride + n * entry_stride` bytes after the base, `head_bytes` long.
struct EntrySource {
  struct Half {
    const std::byte* base;
    int64_t head_stride;
    int64_t entry_stride;
  };
  Half keys;
  Half values;
  int64_t heads;
  int64_t head_bytes;
  Element element = Element::kFloat32;

  int64_t entry_bytes() const { return 2 * heads * head_bytes; }
  // Numbers in one head's K or V.
  int64_t head_dim() const { return head_bytes / size_of(element); }
  // Writes entry `n` as [K of all heads | V of all heads].
  void assemble(int64_t n, std::byte* out) const;
};

}  // namespace swarm_kv
