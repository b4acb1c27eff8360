#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/simulate.h"
#include "core/tier.h"

namespace swarm_kv {

// Which activations a cluster cache of `capacity` entries would have served: one value per entry of
// each step in turn, 1 where it was cached when its step began. The cache is the store's own and
// decides as in a real fetch: a step counts as an activation of its entries, those that are cached
// are pinned while the others are read and offered. With a `fill`, it begins as after write().
// Throws Error(kArgument) as make_cache_policy(), place() and InitialFill::check() do, and for an
// entry that does not exist or that a step names twice.
std::vector<uint8_t> simulate_cache(SimulatedLayout layout, const std::string& policy,
                                    int64_t capacity, const InitialFill& fill,
                                    std::span<const std::span<const int64_t>> steps);

}  // namespace swarm_kv
