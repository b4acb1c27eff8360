#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/dedupe.h"
#include "core/drive_load.h"

namespace swarm_kv {

// Chooses, for each entry that must be read, the copy to read: the balancing of §6.1.
class Router {
 public:
  virtual ~Router() = default;

  // Whether an entry that several clusters or rows selected is read once.
  virtual bool unites() const = 0;

  // Sets `chosen` to one member position per entry of `wanted`, in order.
  virtual void route(std::span<Segment* const> segments, const WantedList& wanted,
                     const DriveLoad& drives, std::vector<int32_t>& chosen) const = 0;
};

// By name, with the ablations of Fig. 14 of arXiv 2603.17803:
//   swarm         the union, balanced: from each entry's first copy to whichever even out when the
//                 drives finish, in seconds and with what their queues hold (rebalance.h)
//   dedup_only    the union, each entry's first copy
//   balance_only  what was selected repeatedly is read repeatedly, balanced
//   static        the same, each copy where it was selected
// Throws Error(kArgument) listing the names.
std::unique_ptr<Router> make_router(const std::string& name);

}  // namespace swarm_kv
