#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "io/block_device.h"
#include "io/transfer.h"

namespace swarm_kv::io {

enum class FaultKind : uint8_t {
  kShort,    // only `keep` bytes are moved, and the completion says so
  kError,    // nothing is moved, the completion carries `error`
  kTorn,     // a write stores `keep` bytes and claims all
  kCorrupt,  // one bit of the data is flipped, and the completion claims success
  kDelay,    // the transfer runs `delay` later
  kHold,     // the transfer runs after clear_rules()
};

// Applies to the transfers of `kind` that touch [offset, offset + length).
struct FaultRule {
  FaultKind fault = FaultKind::kError;
  OpKind kind = OpKind::kRead;
  uint64_t offset = 0;
  uint64_t length = UINT64_MAX;
  uint32_t count = 1;  // transfers that it hits before it is used up; UINT32_MAX: all
  int error = 5;       // EIO
  uint32_t keep = 0;   // bytes
  std::chrono::microseconds delay{0};
  bool cancellable = true;  // false: like a request that the drive already has
};

// Puts faults between a drive and its callers. Transfers run one after another in a thread of the
// decorator, each as a blocking transfer of the inner drive; flush, reserve and registered buffers
// pass through. The first rule that applies to a transfer decides.
class FaultyDevice : public BlockDevice {
 public:
  explicit FaultyDevice(std::shared_ptr<BlockDevice> inner);
  ~FaultyDevice() override;

  void add_rule(const FaultRule& rule);
  void clear_rules();
  uint64_t faults() const;  // transfers that a rule hit

  BlockDevice& inner() { return *inner_; }
  std::string_view engine() const override { return "faulty"; }
  TransferQueue& queue() override;
  std::vector<std::string> notes() const override;
  std::optional<DeviceModel> exact_model() const override;

 protected:
  uint64_t reserve_impl(uint64_t bytes) override;
  void flush_impl() override { inner_->flush(); }
  bool register_buffer_impl(std::span<std::byte> region) override;
  void unregister_buffer_impl(std::span<std::byte> region) override;

 private:
  class Line;
  const std::shared_ptr<BlockDevice> inner_;
  std::unique_ptr<Line> line_;
};

}  // namespace swarm_kv::io
