#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "core/device.h"
#include "ops/tensors.h"

namespace swarm_kv::ops {

// A device crosses from the library that made it to the one that has the stores in a tensor, which
// owns it until a store has taken it.
class DeviceHandle {
 public:
  static Tensor wrap(std::unique_ptr<Device> device) {
    auto* const handle = new DeviceHandle{kMagic, new std::unique_ptr<Device>(std::move(device))};
    return torch::stable::from_blob(handle, {sizeof(DeviceHandle)}, {1},
                                    torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                    ScalarType::Byte, [](void* memory) {
                                      auto* const owned = static_cast<DeviceHandle*>(memory);
                                      delete owned->device_;
                                      delete owned;
                                    });
  }

  // Throws Error(kArgument) for another tensor, or a device that was taken before.
  static std::unique_ptr<Device> take(const char* op, const Tensor& tensor) {
    Argument{op, "device", tensor}.on_cpu().dtype(ScalarType::Byte).dim(1);
    const auto* const handle = data<DeviceHandle>(tensor);
    check(tensor.numel() == sizeof(DeviceHandle) && handle->magic_ == kMagic &&
              *handle->device_ != nullptr,
          op, ": `device` must be a result of device_open that no store has taken yet, got ",
          describe(tensor));
    return std::move(*handle->device_);
  }

 private:
  static constexpr uint64_t kMagic = 0x6b765f6d72617773;

  DeviceHandle(uint64_t magic, std::unique_ptr<Device>* device) : magic_(magic), device_(device) {}

  uint64_t magic_;
  std::unique_ptr<Device>* device_;  // elsewhere, so that a copy of the tensor's bytes is the same
};

}  // namespace swarm_kv::ops
