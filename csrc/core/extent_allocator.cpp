#include "core/extent_allocator.h"

#include <algorithm>
#include <string>

#include "io/error.h"

namespace swarm_kv {
namespace {
// Growing a file in steps keeps fallocate calls rare without claiming much more than is used.
constexpr uint64_t kGrowth = 16u << 20;
}  // namespace

ExtentAllocator::ExtentAllocator(std::shared_ptr<io::BlockDevice> device, uint64_t limit)
    : device_(std::move(device)), limit_(limit) {}

uint64_t ExtentAllocator::round_up(uint64_t bytes) const {
  const uint64_t block = device_->geometry().block;
  return (bytes + block - 1) / block * block;
}

void ExtentAllocator::check_limit(uint64_t length) const {
  if (limit_ == 0 || used_ + length <= limit_) return;
  throw Error(ErrorKind::kCapacity,
              "drive " + device_->name() + ": " + std::to_string(length) +
                  " bytes would exceed `disk_bytes` (" + std::to_string(limit_) + " per drive, " +
                  std::to_string(used_) + " in use). Raise `disk_bytes` or add a drive.");
}

uint64_t ExtentAllocator::allocate(uint64_t bytes) {
  const uint64_t length = round_up(bytes);
  if (length == 0) return 0;
  check_limit(length);
  if (const auto reused = free_.take(length)) {
    used_ += length;
    return *reused;
  }
  if (end_ + length > device_->capacity()) grow(end_ + length);
  const uint64_t offset = end_;
  end_ += length;
  used_ += length;
  return offset;
}

std::optional<uint64_t> ExtentAllocator::shortage(uint64_t bytes) const {
  const uint64_t length = round_up(bytes);
  check_limit(length);
  if (free_.longest() >= length || end_ + length <= device_->capacity()) return std::nullopt;
  return end_ + length;
}

void ExtentAllocator::grow(uint64_t capacity) {
  try {
    device_->reserve(std::max(capacity, device_->capacity() + kGrowth));
  } catch (const Error&) {
    device_->reserve(capacity);  // a nearly full drive may still hold exactly what is asked
  }
}

void ExtentAllocator::release(uint64_t offset, uint64_t bytes) {
  const uint64_t length = round_up(bytes);
  if (length == 0) return;
  used_ -= std::min(used_, length);
  free_.give(offset, length);
  end_ = free_.trim(end_);
}

}  // namespace swarm_kv
