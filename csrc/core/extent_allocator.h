#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "core/free_ranges.h"
#include "io/block_device.h"

namespace swarm_kv {

// Byte ranges of one drive. Every extent begins on a block, so that it can be written with
// O_DIRECT; freed neighbours are joined and reused first fit before the drive's file grows. Not
// thread-safe.
class ExtentAllocator {
 public:
  // `limit` caps what may be allocated on this drive, in bytes; 0 means no cap.
  ExtentAllocator(std::shared_ptr<io::BlockDevice> device, uint64_t limit);

  // Offset of `bytes`, rounded up to blocks; nothing is taken for 0. Throws Error(kCapacity) above
  // the cap and Error(kStorage) when the drive is full; nothing is allocated then.
  uint64_t allocate(uint64_t bytes);
  // The capacity that the drive needs for allocate(), or nothing where it has it. grow()
  // beforehand, without the lock that protects the rest, leaves allocate() without I/O.
  std::optional<uint64_t> shortage(uint64_t bytes) const;
  void grow(uint64_t capacity);
  void release(uint64_t offset, uint64_t bytes);

  uint64_t used() const { return used_; }

 private:
  uint64_t round_up(uint64_t bytes) const;
  void check_limit(uint64_t length) const;

  std::shared_ptr<io::BlockDevice> device_;
  uint64_t limit_;
  uint64_t end_ = 0;  // everything at or above it has never been allocated
  uint64_t used_ = 0;
  FreeRanges free_;
};

}  // namespace swarm_kv
