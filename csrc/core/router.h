#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/dedupe.h"
#include "io/device_model.h"

namespace swarm_kv {

// Chooses, for each entry that must be read, the copy to read: the balancing of §6.1.
class Router {
 public:
  virtual ~Router() = default;

  // Returns one member position per entry of `wanted`, in order. `drives` holds each drive's model.
  virtual std::vector<int32_t> route(const std::vector<Segment*>& segments,
                                     const WantedList& wanted,
                                     const std::vector<io::DeviceModel>& drives) const = 0;
};

// "swarm": entries that only one drive holds first (ascending replication factor), the others to
// the candidate drive that finishes first by its device model, in seconds, so that unequal drives
// balance; ties go to the lower drive. "static": always the first copy.
// Throws Error(kArgument) listing the names.
std::unique_ptr<Router> make_router(const std::string& name);

}  // namespace swarm_kv
