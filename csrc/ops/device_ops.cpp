#include <torch/csrc/stable/library.h>

#include <memory>

#include "core/host_device.h"
#include "ops/device_handle.h"
#include "ops/stores.h"

// Devices that stores attend on. What a device is made of is of the library for it: the tensor that
// device_open takes chooses.
namespace swarm_kv::ops {
namespace {

Tensor device_open(Tensor like) {
  check_on_cpu("device_open", {{"like", like}});
  return DeviceHandle::wrap(std::make_unique<HostDevice>());
}

void store_attach(int64_t handle, Tensor device, int64_t hbm_bytes) {
  check(hbm_bytes >= 0, "store_attach: `hbm_bytes` must be at least 0, got ", hbm_bytes);
  const std::shared_ptr<Store> store = store_of(handle);
  store->attach(DeviceHandle::take("store_attach", device), hbm_bytes);
}

}  // namespace
}  // namespace swarm_kv::ops

STABLE_TORCH_LIBRARY_FRAGMENT(swarm_kv, m) {
  m.def("device_open(Tensor like) -> Tensor");
  m.def("store_attach(int store, Tensor device, int hbm_bytes) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CPU, m) {
  m.impl("device_open", SWARM_KV_BOX(swarm_kv::ops::device_open));
}

STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CompositeExplicitAutograd, m) {
  m.impl("store_attach", SWARM_KV_BOX(swarm_kv::ops::store_attach));
}
