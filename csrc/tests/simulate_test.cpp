#include "core/simulate.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "core/parallel.h"
#include "io/error.h"

namespace swarm_kv {
namespace {

// Two clusters of four far entries, striped over two drives, and 32 loose entries behind them.
SimulatedLayout small_layout() {
  SimulatedLayout layout;
  layout.clusters.members = {0, 2, 4, 6, 1, 3, 5, 7};
  layout.clusters.offsets = {0, 4, 8};
  for (int32_t n = 8; n < 40; ++n) layout.clusters.members.push_back(n);
  layout.entries = 40;
  layout.entry_bytes = 1024;
  layout.drives = {{{1e-6, 1e-9}, 512}, {{1e-6, 2e-9}, 4096}};
  layout.placement = "round_robin";
  layout.router = "swarm";
  return layout;
}

TEST(Simulate, CountsRequestsBytesAndSecondsOfEachStep) {
  const std::vector<int64_t> first{0}, none{}, run{8, 9, 10};
  const std::vector<SimulatedStep> steps = {{first, none}, {none, run}, {none, none}};
  const SimulatedReads reads = simulate_reads(small_layout(), steps);
  // Cluster 0: two entries on each drive; the second drive reads its first block of 4096.
  // Entries 8 to 10 are a part of the run that follows 4 entries on the first drive.
  EXPECT_EQ(reads.requests, (std::vector<int64_t>{1, 1, 1, 0, 0, 0}));
  EXPECT_EQ(reads.bytes, (std::vector<int64_t>{2048, 4096, 3072, 0, 0, 0}));
  EXPECT_DOUBLE_EQ(reads.seconds[0], 1e-6 + 4096 * 2e-9);
  EXPECT_DOUBLE_EQ(reads.seconds[1], 1e-6 + 3072 * 1e-9);
  EXPECT_EQ(reads.seconds[2], 0.0);
}

TEST(Simulate, StepsDoNotDependOnTheThreadsThatRunThem) {
  std::mt19937 random(1);
  std::vector<std::vector<int64_t>> wanted(40, std::vector<int64_t>(12));
  std::vector<SimulatedStep> steps;
  const std::vector<int64_t> second{1};
  for (auto& entries : wanted) {
    for (int64_t& entry : entries) entry = random() % 40;
    steps.push_back({random() % 2 ? std::span(second) : std::span<const int64_t>(), entries});
  }
  const int before = num_threads();
  set_num_threads(1);
  const SimulatedReads alone = simulate_reads(small_layout(), steps);
  set_num_threads(4);
  const SimulatedReads together = simulate_reads(small_layout(), steps);
  set_num_threads(before);
  EXPECT_EQ(together.requests, alone.requests);
  EXPECT_EQ(together.bytes, alone.bytes);
  EXPECT_EQ(together.seconds, alone.seconds);
  EXPECT_GT(std::accumulate(alone.requests.begin(), alone.requests.end(), int64_t{0}), 80);
}

TEST(Simulate, RefusesWhatAStoreWouldRefuse) {
  const std::vector<int64_t> none{}, beyond{40}, third{2};
  EXPECT_THROW(simulate_reads(small_layout(), std::vector<SimulatedStep>{{none, beyond}}), Error);
  EXPECT_THROW(simulate_reads(small_layout(), std::vector<SimulatedStep>{{third, none}}), Error);
  for (const int64_t entry_bytes : {int64_t{0}, int64_t{1} << 31}) {
    SimulatedLayout layout = small_layout();
    layout.entry_bytes = entry_bytes;
    EXPECT_THROW(simulate_reads(layout, {}), Error);
  }
  SimulatedLayout incomplete = small_layout();
  incomplete.entries = 41;
  EXPECT_THROW(simulate_reads(incomplete, {}), Error);
  EXPECT_NO_THROW(simulate_reads(small_layout(), {}));
}

}  // namespace
}  // namespace swarm_kv
