#pragma once

#include "core/entry_source.h"
#include "ops/cuda/device.h"

namespace swarm_kv::cuda {

// Floating values in device memory, for callers that do not know the device's own types. Not
// float64.
struct Values {
  const void* data;
  Element element;
};

#if defined(__CUDACC__) || defined(SWARM_KV_EMULATION)

// Calls function(const T* data) and returns what it does.
template <typename Function>
auto with_type(const Values& values, const Function& function) {
  switch (values.element) {
    case Element::kFloat16:
      return function(static_cast<const Half*>(values.data));
    case Element::kBFloat16:
      return function(static_cast<const BFloat16*>(values.data));
    default:
      return function(static_cast<const float*>(values.data));
  }
}

#endif

}  // namespace swarm_kv::cuda
