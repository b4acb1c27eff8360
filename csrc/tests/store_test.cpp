#include "core/store.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <thread>

#include "tests/store_rig.h"

namespace swarm_kv {
namespace {

constexpr int64_t kHeads = 2;
constexpr int64_t kHeadBytes = 192;
constexpr int64_t kEntryBytes = 2 * kHeads * kHeadBytes;  // 768: not a multiple of a block

// Entry n of `seed` has bytes that no other entry has.
struct Data {
  std::vector<std::byte> keys, values;
  int64_t count;

  Data(int64_t n, unsigned seed) : keys(n * kHeads * kHeadBytes), values(keys.size()), count(n) {
    std::mt19937 random(seed);
    for (auto* half : {&keys, &values}) {
      for (std::byte& byte : *half) byte = static_cast<std::byte>(random());
    }
  }
  EntrySource source() const {
    const auto half = [this](const std::vector<std::byte>& bytes) {
      return EntrySource::Half{bytes.data(), count * kHeadBytes, kHeadBytes};
    };
    return {half(keys), half(values), kHeads, kHeadBytes};
  }
  bool matches(int64_t n, const std::byte* entry) const {
    std::vector<std::byte> expected(kEntryBytes);
    source().assemble(n, expected.data());
    return std::memcmp(expected.data(), entry, kEntryBytes) == 0;
  }
};

TEST(Store, ReturnsWhatWasWritten) {
  Rig rig;
  const Data data(500, 1);
  const int64_t segment = rig.store->write(data.source(), 500, overlapping(500), "layer 0");
  const auto seen = fetch(*rig.store, data, {segment}, {}, range(0, 500), 500);
  EXPECT_EQ(seen.size(), 500u);
  EXPECT_TRUE(all_right(seen));
  const Data other(500, 2);
  EXPECT_FALSE(all_right(fetch(*rig.store, other, {segment}, {}, range(0, 500), 500)));
}

TEST(Store, ClustersAndSinglesComeOnceUpToTheLimit) {
  Rig rig;
  const Data data(100, 1);
  const int64_t segment = rig.store->write(data.source(), 100, overlapping(100), "layer 0");
  // Cluster 0 holds 0..7, cluster 13 begins the far ones: 0, 3, ... 27. Entry 3 is in both.
  const auto seen = fetch(*rig.store, data, {segment}, {0, 13, 0}, {3, 50, 90}, 60);
  std::set<int64_t> expected{0, 1, 2, 3, 4, 5, 6, 7, 9, 12, 15, 18, 21, 24, 27, 50};
  std::set<int64_t> got;
  for (const auto& [entry, right] : seen) got.insert(entry);
  EXPECT_EQ(got, expected);
  EXPECT_TRUE(all_right(seen));
}

TEST(Store, LooseEntriesLieInRunsThatReadAsOne) {
  Rig rig;
  const Data data(400, 1);
  Clusters clusters;  // the even entries in clusters of 4 far ones, the odd ones loose
  for (int32_t n = 0; n < 400; n += 2) clusters.members.push_back(n * 37 % 400);
  for (int32_t at = 4; at <= 200; at += 4) clusters.offsets.push_back(at);
  for (int32_t n = 1; n < 400; n += 2) clusters.members.push_back(n);
  const int64_t segment = rig.store->write(data.source(), 400, clusters, "layer 0");
  EXPECT_TRUE(all_right(fetch(*rig.store, data, {segment}, range(0, 50), {}, 400)));
  const auto requests = [&](std::vector<int64_t> entries) {
    const std::string key = "\"stream\": {", name = "\"requests\": ";
    const auto total = [&] {
      const std::string stats = rig.store->stats();
      return std::stoi(stats.substr(stats.find(name, stats.find(key)) + name.size()));
    };
    const int before = total();
    const auto seen = fetch(*rig.store, data, {segment}, {}, entries, 400, Purpose::kStream);
    EXPECT_EQ(seen.size(), entries.size());
    EXPECT_TRUE(all_right(seen));
    return total() - before;
  };
  std::vector<int64_t> run, far;
  for (int64_t n = 33; n < 65; n += 2) run.push_back(n);
  for (int64_t n = 1; n < 400; n += 2 * kRun) far.push_back(n);
  EXPECT_EQ(requests(run), 1);
  EXPECT_GT(requests(far), 1);
}

// Drives of a simulated machine, each with its own model and capacity (0: no limit).
struct Mixed {
  std::vector<std::shared_ptr<io::BlockDevice>> drives;
  std::unique_ptr<Store> store;

  Mixed(std::vector<io::DeviceModel> models, std::vector<uint64_t> capacities) {
    std::vector<io::DeviceOptions> devices(models.size());
    for (size_t i = 0; i < models.size(); ++i) {
      devices[i].engine = "simulated";
      devices[i].label = "drive" + std::to_string(i);
      devices[i].model = models[i];
      devices[i].capacity_limit = capacities[i];
    }
    StoreOptions options;
    options.dram_bytes = 8 << 20;
    options.staging_bytes = 1 << 20;
    options.placement = "weighted";
    drives = io::open_devices(devices);
    store = std::make_unique<Store>(options, drives);
  }
};

TEST(Store, WeightedPlacementFollowsTheMeasuredSpeeds) {
  Mixed mixed({{1e-5, 1e-9}, {4e-5, 4e-9}}, {0, 0});
  const Data data(1000, 1);
  std::vector<uint64_t> before;
  for (const auto& drive : mixed.drives) before.push_back(drive->counters().write_bytes);
  Clusters clusters;
  for (int32_t n = 0; n < 1000; ++n) clusters.members.push_back(999 - n);
  clusters.offsets.push_back(1000);
  const int64_t segment = mixed.store->write(data.source(), 1000, clusters, "layer 0");
  const auto written = [&](size_t drive) {
    return static_cast<double>(mixed.drives[drive]->counters().write_bytes - before[drive]);
  };
  EXPECT_NEAR(written(0) / written(1), 4.0, 0.1);
  EXPECT_TRUE(all_right(fetch(*mixed.store, data, {segment}, {0}, {}, 1000)));
}

TEST(Store, AFullDriveAmongLargerOnesIsNamedAndNothingStays) {
  Mixed mixed({{1e-5, 1e-9}, {1e-5, 1e-9}, {1e-5, 1e-9}}, {0, 5 << 20, 0});
  const Data small(100, 1), large(30000, 2);
  const int64_t kept = mixed.store->write(small.source(), 100, overlapping(100), "small");
  const auto held = [&] {  // up to the drives' own counters
    const std::string stats = mixed.store->stats();
    return stats.substr(0, stats.find("\"decode\""));
  };
  const std::string before = held().substr(0, held().find("\"peak\""));
  std::string message;
  EXPECT_EQ(kind_of([&] { mixed.store->write(large.source(), 30000, overlapping(30000), "x"); },
                    &message),
            ErrorKind::kStorage);
  EXPECT_NE(message.find("drive1"), std::string::npos) << message;
  EXPECT_EQ(held().substr(0, held().find("\"peak\"")), before);
  EXPECT_TRUE(all_right(fetch(*mixed.store, small, {kept}, {}, range(0, 100), 100)));
  mixed.store->free_segment(kept);
  EXPECT_NE(held().find("\"padding_bytes\": 0"), std::string::npos) << held();
}

TEST(Store, CountsCopiesAndPadding) {
  Rig rig(2);
  const Data data(3, 1);
  Clusters clusters;
  clusters.members = {0, 2, 2, 1};
  clusters.offsets = {0, 2, 3};
  rig.store->write(data.source(), 3, clusters, "layer 0");
  const uint64_t block = rig.drives[0]->geometry().block;
  const auto rounded = [&](uint64_t bytes) { return (bytes + block - 1) / block * block; };
  const std::string padding = std::to_string(2 * rounded(2 * kEntryBytes) - 4 * kEntryBytes);
  const std::string stats = rig.store->stats();
  EXPECT_NE(
      stats.find("\"stored_entries\": 3, \"stored_copies\": 4, \"padding_bytes\": " + padding),
      std::string::npos)
      << stats;
}

TEST(Store, SegmentsAreNumberedThrough) {
  Rig rig;
  const Data whole(90, 3);
  const auto part = [&](int64_t first, int64_t count) {
    EntrySource source = whole.source();
    source.keys.base += first * kHeadBytes;
    source.values.base += first * kHeadBytes;
    return rig.store->write(source, count, overlapping(count), "part");
  };
  const int64_t a = part(0, 40), b = part(40, 50);
  const int64_t clusters_of_a = rig.store->segment(a)->clusters.count();
  const auto seen = fetch(*rig.store, whole, {a, b}, {clusters_of_a}, {0, 89}, 90);
  EXPECT_EQ(seen.size(), 10u);  // 40..47, 0, 89
  EXPECT_TRUE(seen.contains(40) && seen.contains(47) && seen.contains(89));
  EXPECT_TRUE(all_right(seen));
}

TEST(Store, WhatWasReadIsServedFromTheCacheNextTime) {
  Rig rig;
  const Data data(300, 1);
  const int64_t segment = rig.store->write(data.source(), 300, overlapping(300), "layer 0");
  fetch(*rig.store, data, {segment}, {}, range(0, 100), 300);
  const auto submitted =
      submit(*rig.store, {{{segment}, {}, range(0, 120), 300}}, Purpose::kDecode);
  EXPECT_EQ(submitted.resident.ids.size(), 100u);
  rig.store->release_ticket(submitted.ticket);
  EXPECT_TRUE(all_right(fetch(*rig.store, data, {segment}, {}, range(0, 120), 300)));
}

// A profile of 256 queries in which few entries are activated often and most hardly ever, and steps
// that go on like it.
struct Habit {
  static constexpr int64_t kQueries = 256;
  std::vector<int32_t> activations;
  std::mt19937 random{5};

  explicit Habit(int64_t entries) : activations(entries) {
    for (int64_t n = 0; n < entries; ++n) activations[n] = kQueries * 10 / (10 + n);
    std::shuffle(activations.begin(), activations.end(), random);
  }
  std::vector<int64_t> step() {
    std::vector<int64_t> entries;
    for (size_t n = 0; n < activations.size(); ++n) {
      if (static_cast<int32_t>(random() % kQueries) < activations[n]) entries.push_back(n);
    }
    return entries;
  }
};

// Share of the wanted entries that the cluster cache serves in the first steps.
double early_hits(const std::string& policy, InitialFill fill, const Habit& habit) {
  StoreOptions options;
  options.dram_bytes =
      320 << 10;  // of which the cache gets about 200 KiB: a quarter of the entries
  options.staging_bytes = 64 << 10;
  options.cache_policy = policy;
  Rig rig(2, options);
  const Data data(1000, 1);
  const int64_t segment = rig.store->write(data.source(), 1000, overlapping(1000), "layer 0", fill);
  EXPECT_EQ(number_in(rig.store->stats(), "cached_entries") > 0, fill.score != "none");
  EXPECT_LE(number_in(rig.store->stats(), "peak"), options.dram_bytes);
  Habit steps = habit;
  uint64_t wanted = 0, hits = 0;
  for (int step = 0; step < 4; ++step) {
    const auto entries = steps.step();
    const auto submitted = submit(*rig.store, {{{segment}, {}, entries, 1000}}, Purpose::kDecode);
    wanted += entries.size();
    hits += submitted.resident.ids.size();
    for (size_t i = 0; i < submitted.resident.ids.size(); ++i) {
      EXPECT_TRUE(data.matches(submitted.resident.ids[i],
                               rig.store->region()->data() + submitted.resident.slots[i]));
    }
    while (wait(*rig.store, submitted.ticket).more) {
    }
    rig.store->release_ticket(submitted.ticket);
    EXPECT_LE(number_in(rig.store->stats(), "peak"), options.dram_bytes);
  }
  return static_cast<double>(hits) / static_cast<double>(wanted);
}

TEST(Store, ACacheThatBeginsWithTheProfileServesTheFirstSteps) {
  const Habit habit(1000);
  std::vector<int32_t> opposite(habit.activations);
  for (int32_t& count : opposite) count = Habit::kQueries - count;
  for (const char* policy : {"decayed_frequency", "lru"}) {
    const double without = early_hits(policy, {}, habit);
    for (const char* score : {"printed", "product"}) {
      const double with = early_hits(policy, {score, habit.activations, Habit::kQueries}, habit);
      const double wrong = early_hits(policy, {score, opposite, Habit::kQueries}, habit);
      EXPECT_GT(with, without + 0.15) << policy << " " << score;
      EXPECT_GT(with, wrong + 0.15) << policy << " " << score;
      RecordProperty(std::string(policy) + "_" + score, std::to_string(with));
    }
    RecordProperty(std::string(policy) + "_none", std::to_string(without));
  }
}

TEST(Store, LayersShareTheInitialFill) {
  StoreOptions options;
  options.dram_bytes = 512 << 10;
  options.staging_bytes = 64 << 10;
  Rig rig(2, options);
  const Data data(300, 1);
  const Habit habit(300);
  std::vector<int64_t> segments;
  for (int layer = 0; layer < 4; ++layer) {
    segments.push_back(rig.store->write(data.source(), 300, overlapping(300), "a layer",
                                        {"printed", habit.activations, Habit::kQueries}));
    EXPECT_LE(number_in(rig.store->stats(), "peak"), options.dram_bytes);
  }
  const uint64_t cached = number_in(rig.store->stats(), "cached_entries");
  EXPECT_GT(cached, 300u);
  EXPECT_LT(cached, 1000u);
  for (const int64_t segment : segments) {
    const auto all = submit(*rig.store, {{{segment}, {}, range(0, 300), 300}}, Purpose::kStream);
    EXPECT_NEAR(all.resident.ids.size(), cached / 4.0, 20);
    for (size_t i = 0; i < all.resident.ids.size(); ++i) {
      EXPECT_TRUE(
          data.matches(all.resident.ids[i], rig.store->region()->data() + all.resident.slots[i]));
    }
    rig.store->release_ticket(all.ticket);
  }
}

TEST(Store, AProfileThatDoesNotFitChangesNothing) {
  Rig rig;
  const Data data(90, 1);
  const std::vector<int32_t> short_one(89, 1), right(90, 1);
  const std::string before = rig.store->stats();
  for (const InitialFill& fill :
       {InitialFill{"printed", short_one, 8}, InitialFill{"printed", right, 0},
        InitialFill{"best", right, 8}}) {
    EXPECT_EQ(kind_of([&] { rig.store->write(data.source(), 90, overlapping(90), "x", fill); }),
              ErrorKind::kArgument);
  }
  EXPECT_EQ(rig.store->stats(), before);
  rig.store->write(data.source(), 90, overlapping(90), "x", {"printed", right, 8});
  EXPECT_NE(rig.store->stats(), before);
}

TEST(Store, StreamingLeavesTheCacheAlone) {
  Rig rig;
  const Data data(300, 1);
  const int64_t segment = rig.store->write(data.source(), 300, overlapping(300), "layer 0");
  fetch(*rig.store, data, {segment}, {}, range(0, 300), 300, Purpose::kStream);
  const auto submitted =
      submit(*rig.store, {{{segment}, {}, range(0, 300), 300}}, Purpose::kDecode);
  EXPECT_TRUE(submitted.resident.ids.empty());
  rig.store->release_ticket(submitted.ticket);
}

TEST(Store, ASmallArenaTakesRounds) {
  StoreOptions options;
  options.staging_bytes = 64 << 10;
  Rig rig(3, options);
  const Data data(1000, 1);
  const int64_t segment = rig.store->write(data.source(), 1000, overlapping(1000), "layer 0");
  int rounds = 0;
  const auto seen =
      fetch(*rig.store, data, {segment}, {}, range(0, 1000), 1000, Purpose::kStream, &rounds);
  EXPECT_EQ(seen.size(), 1000u);
  EXPECT_TRUE(all_right(seen));
  EXPECT_GT(rounds, 5);
}

TEST(Store, HoldsNoMoreThanTheBudgetAndYieldsTheCache) {
  StoreOptions options;
  options.dram_bytes = 512 << 10;
  options.staging_bytes = 64 << 10;
  Rig rig(2, options);
  const Data data(1500, 1);
  const int64_t segment = rig.store->write(data.source(), 1500, overlapping(1500), "layer 0");
  for (int step = 0; step < 20; ++step) {
    fetch(*rig.store, data, {segment}, {}, range(step * 50, step * 50 + 300), 1500);
  }
  // The cache has taken what was free; the window gets it back.
  const Data recent(120, 2);
  const auto slots = rig.store->append(recent.source(), 120);
  for (int64_t n = 0; n < 120; ++n) {
    EXPECT_TRUE(recent.matches(n, rig.store->region()->data() + slots[n]));
  }
  EXPECT_TRUE(all_right(fetch(*rig.store, data, {segment}, {}, range(0, 1500), 1500)));
  std::string message;
  EXPECT_EQ(kind_of([&] { rig.store->append(Data(2000, 3).source(), 2000); }, &message),
            ErrorKind::kCapacity);
  EXPECT_NE(message.find("dram_bytes"), std::string::npos) << message;
  rig.store->release(slots);
  EXPECT_EQ(kind_of([&] { rig.store->release(slots); }), ErrorKind::kArgument);
}

// What the kernel holds in memory of the store's address range.
uint64_t resident_bytes(const Region& region) {
  const uint64_t page = sysconf(_SC_PAGESIZE);
  std::vector<unsigned char> pages(region.size() / page);
  if (mincore(region.data(), region.size(), pages.data()) != 0) return 0;
  return page * std::count_if(pages.begin(), pages.end(), [](auto flags) { return flags & 1; });
}

TEST(Store, MemoryThatIsGivenUpReallyGoes) {
  StoreOptions options;
  options.dram_bytes = 1 << 20;
  options.staging_bytes = 64 << 10;
  Rig rig(2, options);
  const Data data(1200, 1), recent(37, 2);
  const int64_t segment = rig.store->write(data.source(), 1200, overlapping(1200), "layer 0");
  std::vector<std::vector<int64_t>> held;
  for (int step = 0; step < 60; ++step) {  // the window grows and shrinks, the cache gives way
    fetch(*rig.store, data, {segment}, {}, range(0, 1200), 1200);
    held.push_back(rig.store->append(recent.source(), 37));
    if (step % 20 == 19) {
      for (const auto& slots : held) rig.store->release(slots);
      held.clear();
    }
    ASSERT_LE(resident_bytes(*rig.store->region()), options.dram_bytes) << "step " << step;
  }
  fetch(*rig.store, data, {segment}, {}, range(0, 1200), 1200);  // the cache takes it all again
  EXPECT_GT(resident_bytes(*rig.store->region()), options.dram_bytes / 2);
  for (int i = 1; i <= 300; ++i) {  // in small steps, each a part of a page
    rig.store->charge_index(1000);
    ASSERT_LE(resident_bytes(*rig.store->region()) + i * 1000, options.dram_bytes) << i;
  }
}

TEST(Store, PinnedEntriesSurviveWhenTheCacheMustYield) {
  StoreOptions options;
  options.dram_bytes = 384 << 10;
  options.staging_bytes = 64 << 10;
  Rig rig(2, options);
  const Data data(400, 1);
  const int64_t segment = rig.store->write(data.source(), 400, overlapping(400), "layer 0");
  fetch(*rig.store, data, {segment}, {}, range(0, 400), 400);
  const auto held = submit(*rig.store, {{{segment}, {}, range(0, 400), 400}}, Purpose::kDecode);
  ASSERT_FALSE(held.resident.ids.empty());
  EXPECT_EQ(kind_of([&] { rig.store->append(Data(250, 2).source(), 250); }), ErrorKind::kCapacity);
  for (size_t i = 0; i < held.resident.ids.size(); ++i) {
    EXPECT_TRUE(
        data.matches(held.resident.ids[i], rig.store->region()->data() + held.resident.slots[i]));
  }
  rig.store->release_ticket(held.ticket);
  EXPECT_EQ(rig.store->append(Data(250, 2).source(), 250).size(), 250u);
}

TEST(Store, AFailedReadIsServedByAReplica) {
  Rig rig;
  const Data data(90, 1);
  const int64_t segment = rig.store->write(data.source(), 90, overlapping(90), "layer 0");
  rig.drives[0]->add_rule({.fault = io::FaultKind::kError, .count = 1});
  const auto seen = fetch(*rig.store, data, {segment}, {}, {0}, 90);
  EXPECT_TRUE(all_right(seen));
  EXPECT_NE(rig.store->stats().find("\"repaired\": 1"), std::string::npos) << rig.store->stats();
}

TEST(Store, WithoutAReplicaTheErrorNamesDriveSegmentAndEntry) {
  Rig rig;
  const Data data(90, 1);
  const int64_t segment = rig.store->write(data.source(), 90, overlapping(90), "layer 7");
  rig.drives[1]->add_rule({.fault = io::FaultKind::kError, .count = UINT32_MAX});
  std::string message;
  EXPECT_EQ(kind_of([&] { fetch(*rig.store, data, {segment}, {}, range(0, 90), 90); }, &message),
            ErrorKind::kStorage);
  for (const char* part : {"drive1", "layer 7", "entry"}) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  rig.drives[1]->clear_rules();  // the failed fetch left nothing behind
  EXPECT_TRUE(all_right(fetch(*rig.store, data, {segment}, {}, range(0, 90), 90)));
  rig.store->close();
}

TEST(Store, SilentCorruptionIsFoundByTheChecksum) {
  for (const bool verify : {true, false}) {
    StoreOptions options;
    options.verify = verify;
    Rig rig(3, options);
    const Data data(90, 1);
    const int64_t segment = rig.store->write(data.source(), 90, overlapping(90), "layer 0");
    for (const auto& drive : rig.drives) {
      drive->add_rule({.fault = io::FaultKind::kCorrupt, .count = UINT32_MAX});
    }
    const auto read = [&] { return fetch(*rig.store, data, {segment}, {}, range(0, 90), 90); };
    if (verify) {
      EXPECT_EQ(kind_of([&] { read(); }), ErrorKind::kStorage);
    } else {
      EXPECT_FALSE(all_right(read()));  // what the checksum protects from
    }
  }
}

TEST(Store, ShortReadsAreCompleted) {
  Rig rig;
  const Data data(300, 1);
  const int64_t segment = rig.store->write(data.source(), 300, overlapping(300), "layer 0");
  for (const auto& drive : rig.drives) {
    drive->add_rule({.fault = io::FaultKind::kShort, .count = 3, .keep = 512});
  }
  EXPECT_TRUE(all_right(fetch(*rig.store, data, {segment}, {}, range(0, 300), 300)));
  EXPECT_GT(rig.drives[0]->faults(), 0u);
}

TEST(Store, AFailedWriteLeavesNothingAllocated) {
  Rig rig(2, {}, "memory", 256 << 10);
  const Data small(100, 1), large(1000, 2);
  const int64_t kept = rig.store->write(small.source(), 100, overlapping(100), "small");
  const std::string before = rig.store->stats();
  EXPECT_EQ(kind_of([&] { rig.store->write(large.source(), 1000, overlapping(1000), "large"); }),
            ErrorKind::kStorage);
  rig.drives[1]->add_rule({.fault = io::FaultKind::kError,
                           .kind = io::OpKind::kWrite,
                           .count = UINT32_MAX,
                           .error = ENOSPC});
  EXPECT_EQ(kind_of([&] { rig.store->write(small.source(), 100, overlapping(100), "small"); }),
            ErrorKind::kStorage);
  rig.drives[1]->clear_rules();
  const auto used = [](const std::string& stats) {
    return stats.substr(stats.find("\"index\""), 20);
  };
  EXPECT_EQ(used(rig.store->stats()), used(before));
  EXPECT_TRUE(all_right(fetch(*rig.store, small, {kept}, {}, range(0, 100), 100)));
  for (int i = 0; i < 20; ++i) {  // freed space is used again
    rig.store->free_segment(rig.store->write(small.source(), 100, overlapping(100), "again"));
  }
}

TEST(Store, DiskBytesCapWhatIsStored) {
  StoreOptions options;
  options.disk_bytes = 100 << 10;
  Rig rig(2, options);
  const Data data(100, 1);
  std::string message;
  EXPECT_EQ(kind_of([&] { rig.store->write(data.source(), 100, overlapping(100), "x"); }, &message),
            ErrorKind::kCapacity);
  EXPECT_NE(message.find("disk_bytes"), std::string::npos) << message;
}

TEST(Store, HandlesAreCheckedAndFreeingWaitsForReaders) {
  Rig rig;
  const Data data(90, 1);
  const int64_t segment = rig.store->write(data.source(), 90, overlapping(90), "layer 0");
  const auto first = submit(*rig.store, {{{segment}, {}, range(0, 90), 90}}, Purpose::kDecode);
  EXPECT_EQ(kind_of([&] { rig.store->close(); }), ErrorKind::kState);
  rig.store->free_segment(segment);
  EXPECT_EQ(kind_of([&] { rig.store->free_segment(segment); }), ErrorKind::kState);
  const Part round = wait(*rig.store, first.ticket);
  for (size_t i = 0; i < round.arrived.ids.size(); ++i) {
    EXPECT_TRUE(
        data.matches(round.arrived.ids[i], rig.store->region()->data() + round.arrived.slots[i]));
  }
  rig.store->release_ticket(first.ticket);
  EXPECT_EQ(kind_of([&] { wait(*rig.store, first.ticket); }), ErrorKind::kState);
  EXPECT_EQ(kind_of([&] { rig.store->release_ticket(first.ticket); }), ErrorKind::kState);
  EXPECT_EQ(kind_of([&] { submit(*rig.store, {{{segment}, {}, {}, 90}}, Purpose::kDecode); }),
            ErrorKind::kState);
  rig.store->close();
  EXPECT_EQ(kind_of([&] { rig.store->append(data.source(), 90); }), ErrorKind::kState);
}

TEST(Store, NumbersOutOfRangeAreRefused) {
  Rig rig;
  const Data data(90, 1);
  const int64_t segment = rig.store->write(data.source(), 90, overlapping(90), "layer 0");
  for (const int64_t wrong : {int64_t{-1}, int64_t{90}, int64_t{1} << 40}) {
    EXPECT_EQ(
        kind_of([&] { submit(*rig.store, {{{segment}, {}, {wrong}, 90}}, Purpose::kDecode); }),
        ErrorKind::kArgument);
    EXPECT_EQ(
        kind_of([&] { submit(*rig.store, {{{segment}, {wrong}, {}, 90}}, Purpose::kDecode); }),
        ErrorKind::kArgument);
  }
  const std::vector<std::byte> wide(2 * 999);
  const EntrySource other{{wide.data(), 999, 999}, {wide.data() + 999, 999, 999}, 1, 999};
  EXPECT_EQ(kind_of([&] { rig.store->append(other, 1); }), ErrorKind::kArgument);
}

TEST(Store, ThreadsFetchAndWriteAtTheSameTime) {
  StoreOptions options;
  options.staging_bytes =
      96 << 10;  // less than the threads want together: they wait for each other
  Rig rig(3, options);
  const Data data(600, 1);
  const int64_t segment = rig.store->write(data.source(), 600, overlapping(600), "layer 0");
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int step = 0; step < 40; ++step) {
        const int64_t first = random() % 450;
        const auto purpose = step % 4 ? Purpose::kDecode : Purpose::kStream;
        const auto seen = fetch(*rig.store, data, {segment}, {static_cast<int64_t>(random() % 75)},
                                range(first, first + 150), 600, purpose);
        wrong += !all_right(seen) || seen.size() < 150;
      }
    });
  }
  threads.emplace_back([&] {
    const Data other(50, 2);
    for (int step = 0; step < 40; ++step) {
      const int64_t mine = rig.store->write(other.source(), 50, overlapping(50), "another");
      wrong += !all_right(fetch(*rig.store, other, {mine}, {}, range(0, 50), 50));
      rig.store->free_segment(mine);
    }
  });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  rig.store->close();
}

TEST(Store, OwnTicketsThatHoldTheArenaAreAnErrorAtOnce) {
  StoreOptions options;
  options.staging_bytes = 96 << 10;
  Rig rig(3, options);
  const Data data(600, 1);
  const int64_t segment = rig.store->write(data.source(), 600, overlapping(600), "layer 0");
  std::vector<int64_t> tickets;
  for (int i = 0; i < 4; ++i) {
    tickets.push_back(
        submit(*rig.store, {{{segment}, {}, range(0, 600), 600}}, Purpose::kStream).ticket);
  }
  EXPECT_EQ(kind_of([&] { wait(*rig.store, tickets.back()); }), ErrorKind::kCapacity);
  for (int i = 0; i < 3; ++i) rig.store->release_ticket(tickets[i]);
  EXPECT_FALSE(wait(*rig.store, tickets.back()).arrived.ids.empty());
  rig.store->release_ticket(tickets.back());
}

TEST(Store, MoreDrivesThanAByteNamesAreRefused) {
  std::string message;
  EXPECT_EQ(kind_of([&] { Rig rig(256); }, &message), ErrorKind::kArgument);
  EXPECT_NE(message.find("at most 255"), std::string::npos) << message;
}

TEST(Store, UnknownStrategiesListTheKnownOnes) {
  for (const auto name :
       {&StoreOptions::router, &StoreOptions::placement, &StoreOptions::cache_policy}) {
    StoreOptions options;
    options.*name = "best";
    std::string message;
    EXPECT_EQ(kind_of([&] { Rig rig(1, options); }, &message), ErrorKind::kArgument);
    EXPECT_NE(message.find("best"), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace swarm_kv
