#include "core/entry_source.h"

#include <cstring>
#include <initializer_list>

#include "core/numeric.h"

namespace swarm_kv {

int64_t size_of(Element element) {
  switch (element) {
    case Element::kFloat16:
    case Element::kBFloat16:
      return 2;
    case Element::kFloat32:
      return 4;
    case Element::kFloat64:
      return 8;
  }
  return 0;
}

void to_float(Element element, const std::byte* source, float* destination, int64_t count) {
  switch (element) {
    case Element::kFloat16:
      return to_float(reinterpret_cast<const fp16*>(source), destination, count);
    case Element::kBFloat16:
      return to_float(reinterpret_cast<const bf16*>(source), destination, count);
    case Element::kFloat32:
      return to_float(reinterpret_cast<const float*>(source), destination, count);
    case Element::kFloat64:
      return to_float(reinterpret_cast<const double*>(source), destination, count);
  }
}

void from_float(Element element, const float* source, std::byte* destination, int64_t count) {
  switch (element) {
    case Element::kFloat16:
      return from_float(source, reinterpret_cast<fp16*>(destination), count);
    case Element::kBFloat16:
      return from_float(source, reinterpret_cast<bf16*>(destination), count);
    case Element::kFloat32:
      return from_float(source, reinterpret_cast<float*>(destination), count);
    case Element::kFloat64:
      return from_float(source, reinterpret_cast<double*>(destination), count);
  }
}

void EntrySource::assemble(int64_t n, std::byte* out) const {
  for (const Half* half : {&keys, &values}) {
    for (int64_t head = 0; head < heads; ++head) {
      std::memcpy(out, half->base + head * half->head_stride + n * half->entry_stride, head_bytes);
      out += head_bytes;
    }
  }
}

}  // namespace swarm_kv
