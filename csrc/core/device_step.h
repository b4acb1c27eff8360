#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "core/store.h"
#include "core/ticket.h"

namespace swarm_kv {

// Entries that lie on the device at the same time, for as long as what is enqueued by the call that
// gets them.
struct DevicePart {
  const Delivery& delivery;
  std::span<const int64_t> slots;  // per entry of it: slot on the device; -1: in another part
  std::span<const int64_t> own;    // per own entry, likewise; empty: all in other parts
};

// A decoding step whose attention runs on the store's device: the counterpart of submit() and
// wait(), with the same rows and errors, and those of Device. Calls `attend`, which enqueues, part
// by part, for every wanted entry and every one of `own` (window slots of the pool) once: first
// what the device keeps, then what the host has, then what arrives from the drives, while copies
// and reads of later parts are under way. The first call has all that is kept, and comes even if
// that is nothing. Entries of later parts are offered to the device's cluster cache.
//
// Steps take turns on a device: another thread waits here for the end of a step.
void step_on_device(Store& store, std::span<const Row> rows, std::span<const int64_t> own,
                    int64_t ahead, const std::function<void(const DevicePart&)>& attend,
                    FetchSeconds& seconds);

}  // namespace swarm_kv
