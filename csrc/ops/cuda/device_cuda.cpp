#include "ops/cuda/copy_stream.h"
#include "ops/cuda/gpu_call.h"
#include "ops/device_handle.h"

namespace swarm_kv::ops {
namespace {

constexpr const char* kOp = "device_open";

// In torch's memory and beside torch's current stream.
class GpuDevice : public cuda::CopyStream {
 public:
  explicit GpuDevice(const Tensor& like) : CopyStream(like.get_device_index()), like_(like) {}
  ~GpuDevice() override { finish(); }

  void allocate(int64_t bytes) override {
    try {
      storage_ = GpuCall(kOp, like_).bytes(bytes);
    } catch (const std::exception& error) {
      throw Error(ErrorKind::kCapacity, concat("the GPU has no room for ", bytes,
                                               " bytes, which are `hbm_bytes` and two "
                                               "batches of copies: lower `hbm_bytes` (",
                                               error.what(), ")"));
    }
    set_memory(storage_.mutable_data_ptr());
  }

  void begin() override { compute_in(GpuCall(kOp, like_).stream()); }

 private:
  const Tensor like_;
  Tensor storage_;
};

Tensor device_open(const Tensor& like) {
  check_on_one_gpu(kOp, {{"like", like}});
  const GpuCall call(kOp, like);
  return DeviceHandle::wrap(std::make_unique<GpuDevice>(torch::stable::new_empty(like, {0})));
}

}  // namespace
}  // namespace swarm_kv::ops

STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CUDA, m) {
  m.impl("device_open", SWARM_KV_BOX(swarm_kv::ops::device_open));
}
