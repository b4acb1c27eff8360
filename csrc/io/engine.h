#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "io/block_device.h"
#include "io/open_device.h"

// What an engine's file supplies to open_device.cpp, where the table of engines is.
namespace swarm_kv::io {

using EngineResult = std::shared_ptr<BlockDevice>;

// What the drives of one engine in one open_devices() call have in common.
struct EngineContext {
  bool shared_ring = true;
  uint32_t total_depth = 0;      // sum of their queue depths
  std::size_t devices = 0;       // how many there are
  std::shared_ptr<void> shared;  // owned by the engine, as a ring; empty for the first drive
};

using EngineFactory = EngineResult (*)(const DeviceOptions& options, EngineContext& context);

}  // namespace swarm_kv::io
