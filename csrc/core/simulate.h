#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/clusters.h"
#include "core/coalesce.h"

namespace swarm_kv {

// A layout that was never written: what its reads would cost.
struct SimulatedLayout {
  Clusters clusters;
  int64_t entries = 0;
  int64_t entry_bytes = 0;
  std::vector<DriveShape> drives;
  std::string placement;
  std::string router;
};

// What one step asks for: clusters taken whole, and single entries.
struct SimulatedStep {
  std::span<const int64_t> clusters;
  std::span<const int64_t> entries;
};

struct SimulatedReads {
  std::vector<int64_t> requests;  // [steps, drives]
  std::vector<int64_t> bytes;     // [steps, drives], gaps and block rounding included
  std::vector<double> seconds;    // per step: the slowest drive's, by its device model
};

// Runs each step through the code of a real fetch (Step::plan) on a first segment
// whose clusters are placed but hold no data. Nothing is cached, and requests grow up to kMaxRead,
// as they do with at least 8 * kMaxRead of staging memory for reads. Steps run in parallel. Throws
// Error(kArgument) as place(), RoutingTable and dedupe() do, and for entry_bytes outside [1, 2^31).
SimulatedReads simulate_reads(SimulatedLayout layout, std::span<const SimulatedStep> steps);

}  // namespace swarm_kv
