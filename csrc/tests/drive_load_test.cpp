// Balancing by what drives are asked and by how fast they have become.
#include "core/drive_load.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "io/simulated_device.h"
#include "tests/store_rig.h"

namespace swarm_kv {
namespace {

constexpr io::DeviceModel kModel{1e-5, 1e-9};

Read read_of(int32_t drive, uint64_t length = 4096) { return {drive, 0, length, 0, 1}; }

// A round of 16 reads on each drive that `takes` so many times what the model says, plus `latency`.
void round(DriveLoad& load, const std::vector<double>& takes, double latency = 0) {
  for (size_t drive = 0; drive < takes.size(); ++drive) {
    std::vector<double> due(takes[drive] > 0 ? 16 : 0);
    for (double& each : due) each = load.start(read_of(drive));
    for (const double each : due) {
      load.end(read_of(drive), each, takes[drive] * (each + latency));
    }
  }
  load.learn();
}

TEST(DriveLoad, CountsWhatIsQueuedInSeconds) {
  DriveLoad load({{kModel}, {{2e-5, 2e-9}}});
  const double first = load.start(read_of(1, 512));
  const double second = load.start(read_of(1, 4096));
  EXPECT_DOUBLE_EQ(first, 2e-5 + 512 * 2e-9);
  EXPECT_DOUBLE_EQ(second, first + 2e-5 + 4096 * 2e-9);
  EXPECT_DOUBLE_EQ(load.queued(1), second);
  EXPECT_EQ(load.queued(0), 0);
  load.drop(read_of(1, 512));
  EXPECT_DOUBLE_EQ(load.queued(1), second - first);
  load.end(read_of(1, 4096), second, second);
  EXPECT_EQ(load.queued(1), 0);
}

TEST(DriveLoad, ASlowDriveIsFoundAndForgiven) {
  DriveLoad load({{kModel}, {kModel}, {kModel}});
  for (int i = 0; i < 10; ++i) round(load, {1, 1.5, 1});
  EXPECT_EQ(load.slowness(1), 1);  // noise
  for (int i = 0; i < 10; ++i) round(load, {1, 50, 1});
  EXPECT_GT(load.slowness(1), 15);
  EXPECT_EQ(load.slowness(0), 1);
  EXPECT_DOUBLE_EQ(load.seconds(1, 1, 0), load.slowness(1) * kModel.t_base);
  DriveLoad unobserved = load;
  for (int i = 0; i < 20; ++i) round(load, {1, 1, 1});
  EXPECT_EQ(load.slowness(1), 1);
  for (int i = 0; i < 20; ++i) round(unobserved, {1, 0, 1});
  EXPECT_GT(unobserved.slowness(1), 10);
  for (int i = 0; i < 400; ++i) round(unobserved, {1, 0, 1});
  EXPECT_EQ(unobserved.slowness(1), 1);  // worth another try
}

TEST(DriveLoad, ABusyMachineAndLatencyMakeNoDriveSlow) {
  DriveLoad load({{kModel}, {kModel}, {kModel}});
  for (int i = 0; i < 5; ++i) round(load, {1, 1, 1}, 1e-3);  // 80 times t_base
  for (int i = 0; i < 10; ++i) round(load, {30, 30, 30}, 1e-3);
  for (size_t drive = 0; drive < load.size(); ++drive) EXPECT_EQ(load.slowness(drive), 1);
}

// Entries of 1 KiB with a copy on each of two drives, on simulated drives.
struct Machine {
  static constexpr int64_t kEntries = 600;
  std::vector<std::shared_ptr<io::BlockDevice>> drives;
  std::unique_ptr<Store> store;
  std::vector<std::byte> bytes = std::vector<std::byte>(kEntries * 1024);
  int64_t segment;

  explicit Machine(const std::string& router) {
    std::vector<io::DeviceOptions> devices(3);
    for (auto& device : devices) {
      device.engine = "simulated";
      device.model = {1e-7, 1e-9};  // gaps are not worth reading: a request for each entry
    }
    drives = io::open_devices(devices);
    StoreOptions options;
    options.dram_bytes = 8 << 20;
    options.staging_bytes = 4 << 20;
    options.router = router;
    store = std::make_unique<Store>(options, drives);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i / 512 * 7 + i);
    const EntrySource::Half half{bytes.data(), 512, 1024};
    // Entry n lies on drives n % 3 and (n + 1) % 3, its neighbours far away.
    Clusters clusters;
    for (int64_t j = 0; j < kEntries; ++j) clusters.members.push_back(7 * j % kEntries);
    for (int64_t j = 0; j < kEntries; ++j) clusters.members.push_back((7 * j + 2) % kEntries);
    clusters.offsets = {0, kEntries, 2 * kEntries};
    segment = store->write({half, half, 1, 512}, kEntries, clusters, "layer 0");
  }
  io::SimulatedDevice& drive(size_t i) { return static_cast<io::SimulatedDevice&>(*drives[i]); }
  bool matches(int64_t id, const std::byte* entry) const {
    return std::equal(entry, entry + 512, &bytes[id * 1024]) &&
           std::equal(entry + 512, entry + 1024, &bytes[id * 1024]);
  }
  static std::vector<int64_t> every(int64_t stride, int64_t first) {
    std::vector<int64_t> entries;
    for (int64_t n = 0; n < 100; ++n) entries.push_back(first + n * stride);
    return entries;
  }
  // Drive 0's part of the bytes that 100 entries take, mean over `steps` steps.
  double share(int steps) {
    std::vector<uint64_t> before;
    for (const auto& each : drives) before.push_back(each->counters().read_bytes);
    const auto entries = every(5, 0);
    for (int i = 0; i < steps; ++i) {
      EXPECT_TRUE(
          all_right(fetch(*store, *this, {segment}, {}, entries, kEntries, Purpose::kStream)));
    }
    double own = 0, all = 0;
    for (size_t d = 0; d < drives.size(); ++d) {
      const auto moved = static_cast<double>(drives[d]->counters().read_bytes - before[d]);
      all += moved;
      if (d == 0) own = moved;
    }
    return own / all;
  }
};

TEST(DriveLoad, TheShareOfADriveThatTurnsSlowFallsAndComesBack) {
  Machine machine("swarm");
  const double before = machine.share(5);
  machine.drive(0).set_slowness(50);
  machine.share(15);
  const double slow = machine.share(5);
  machine.drive(0).set_slowness(1);
  machine.share(100);
  const double after = machine.share(5);
  EXPECT_GT(before, 0.25);
  EXPECT_LT(slow, 0.05);
  EXPECT_GT(after, 0.8 * before);
  // Without balancing it stays.
  Machine fixed("dedup_only");
  const double fixed_before = fixed.share(5);
  fixed.drive(0).set_slowness(50);
  fixed.share(15);
  EXPECT_DOUBLE_EQ(fixed.share(5), fixed_before);
}

TEST(DriveLoad, WhatAnotherFetchHasQueuedCounts) {
  for (const bool queued : {true, false}) {
    Machine machine("swarm");
    Store& store = *machine.store;
    const auto reads = [&](size_t drive) { return machine.drives[drive]->counters().reads; };
    const auto start = [&](int64_t first) {
      return submit(store, {{{machine.segment}, {}, machine.every(6, first), 600}},
                    Purpose::kStream);
    };
    const auto first = start(0);  // on drives 0 and 1
    if (!queued) receive(store, machine, first);
    const auto second = start(1);  // on drives 1 and 2
    if (queued) receive(store, machine, first);
    EXPECT_NEAR(static_cast<double>(reads(0)), 50, 5);
    EXPECT_NEAR(static_cast<double>(reads(1)), 50, 5);
    receive(store, machine, second);
    EXPECT_NEAR(static_cast<double>(reads(1)), queued ? 75 : 100, 5);
    EXPECT_NEAR(static_cast<double>(reads(2)), queued ? 75 : 50, 5);
    EXPECT_EQ(number_in(store.stats(), "staged_bytes"), 0u);
  }
}

}  // namespace
}  // namespace swarm_kv
