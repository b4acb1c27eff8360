#include "core/store.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "io/error.h"
#include "io/faulty_device.h"

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

// Blocks of 8 neighbours, and every third entry once more in a cluster of far ones.
Clusters overlapping(int64_t entries) {
  Clusters clusters;
  const auto close = [&] { clusters.offsets.push_back(clusters.members.size()); };
  for (int64_t n = 0; n < entries; ++n) {
    clusters.members.push_back(n);
    if (n % 8 == 7 || n == entries - 1) close();
  }
  for (int64_t n = 0; n < entries; n += 3) {
    clusters.members.push_back(n);
    if (n % 30 == 27) close();
  }
  if (clusters.offsets.back() != static_cast<int64_t>(clusters.members.size())) close();
  return clusters;
}

std::vector<int64_t> range(int64_t first, int64_t last) {
  std::vector<int64_t> numbers;
  for (int64_t n = first; n < last; ++n) numbers.push_back(n);
  return numbers;
}

struct Rig {
  std::vector<std::shared_ptr<io::FaultyDevice>> drives;
  std::unique_ptr<Store> store;

  explicit Rig(int count = 3, StoreOptions options = {}, const std::string& engine = "memory",
               uint64_t capacity_limit = 0) {
    std::vector<io::DeviceOptions> devices(count);
    for (int i = 0; i < count; ++i) {
      devices[i].engine = engine;
      devices[i].label = "drive" + std::to_string(i);
      devices[i].capacity_limit = capacity_limit;
    }
    std::vector<std::shared_ptr<io::BlockDevice>> wrapped;
    for (const auto& device : io::open_devices(devices)) {
      drives.push_back(std::make_shared<io::FaultyDevice>(device));
      wrapped.push_back(drives.back());
    }
    if (options.dram_bytes == 0) options.dram_bytes = 4 << 20;
    if (options.staging_bytes == 0) options.staging_bytes = 1 << 20;
    options.model = {1e-5, 1e-9};
    store = std::make_unique<Store>(options, wrapped);
  }
};

// Entry number -> its bytes are right, over all rounds.
std::map<int64_t, bool> fetch(Store& store, const Data& data, std::vector<int64_t> segments,
                              std::vector<int64_t> clusters, std::vector<int64_t> entries,
                              int64_t limit, Purpose purpose = Purpose::kDecode,
                              int* rounds = nullptr) {
  std::map<int64_t, bool> seen;
  const auto take = [&](const Fetched& fetched) {
    for (size_t i = 0; i < fetched.ids.size(); ++i) {
      EXPECT_FALSE(seen.contains(fetched.ids[i])) << "entry twice: " << fetched.ids[i];
      seen[fetched.ids[i]] =
          data.matches(fetched.ids[i], store.region()->data() + fetched.slots[i]);
    }
  };
  const auto submitted = store.submit(segments, clusters, entries, limit, purpose);
  take(submitted.resident);
  for (bool more = true; more;) {
    const Store::Round round = store.wait(submitted.ticket);
    take(round.fetched);
    more = round.more;
    if (rounds != nullptr) ++*rounds;
  }
  store.release_ticket(submitted.ticket);
  return seen;
}

bool all_right(const std::map<int64_t, bool>& seen) {
  for (const auto& [entry, right] : seen) {
    if (!right) return false;
  }
  return true;
}

ErrorKind kind_of(const std::function<void()>& call, std::string* message = nullptr) {
  try {
    call();
  } catch (const Error& error) {
    if (message != nullptr) *message = error.what();
    return error.kind();
  }
  ADD_FAILURE() << "no error";
  return ErrorKind::kArgument;
}

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
  const int64_t clusters_of_a = rig.store->clusters_of(a).count();
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
  const auto submitted = rig.store->submit({{segment}}, {}, range(0, 120), 300, Purpose::kDecode);
  EXPECT_EQ(submitted.resident.ids.size(), 100u);
  rig.store->release_ticket(submitted.ticket);
  EXPECT_TRUE(all_right(fetch(*rig.store, data, {segment}, {}, range(0, 120), 300)));
}

TEST(Store, StreamingLeavesTheCacheAlone) {
  Rig rig;
  const Data data(300, 1);
  const int64_t segment = rig.store->write(data.source(), 300, overlapping(300), "layer 0");
  fetch(*rig.store, data, {segment}, {}, range(0, 300), 300, Purpose::kStream);
  const auto submitted = rig.store->submit({{segment}}, {}, range(0, 300), 300, Purpose::kDecode);
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
  const auto held = rig.store->submit({{segment}}, {}, range(0, 400), 400, Purpose::kDecode);
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
  const auto first = rig.store->submit({{segment}}, {}, range(0, 90), 90, Purpose::kDecode);
  EXPECT_EQ(kind_of([&] { rig.store->close(); }), ErrorKind::kState);
  rig.store->free_segment(segment);
  EXPECT_EQ(kind_of([&] { rig.store->free_segment(segment); }), ErrorKind::kState);
  const Store::Round round = rig.store->wait(first.ticket);
  for (size_t i = 0; i < round.fetched.ids.size(); ++i) {
    EXPECT_TRUE(
        data.matches(round.fetched.ids[i], rig.store->region()->data() + round.fetched.slots[i]));
  }
  rig.store->release_ticket(first.ticket);
  EXPECT_EQ(kind_of([&] { rig.store->wait(first.ticket); }), ErrorKind::kState);
  EXPECT_EQ(kind_of([&] { rig.store->release_ticket(first.ticket); }), ErrorKind::kState);
  EXPECT_EQ(kind_of([&] { rig.store->submit({{segment}}, {}, {}, 90, Purpose::kDecode); }),
            ErrorKind::kState);
  rig.store->close();
  EXPECT_EQ(kind_of([&] { rig.store->append(data.source(), 90); }), ErrorKind::kState);
}

TEST(Store, NumbersOutOfRangeAreRefused) {
  Rig rig;
  const Data data(90, 1);
  const int64_t segment = rig.store->write(data.source(), 90, overlapping(90), "layer 0");
  for (const int64_t wrong : {int64_t{-1}, int64_t{90}, int64_t{1} << 40}) {
    EXPECT_EQ(kind_of([&] { rig.store->submit({{segment}}, {}, {{wrong}}, 90, Purpose::kDecode); }),
              ErrorKind::kArgument);
    EXPECT_EQ(kind_of([&] { rig.store->submit({{segment}}, {{wrong}}, {}, 90, Purpose::kDecode); }),
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
        rig.store->submit({{segment}}, {}, range(0, 600), 600, Purpose::kStream).ticket);
  }
  EXPECT_EQ(kind_of([&] { rig.store->wait(tickets.back()); }), ErrorKind::kCapacity);
  for (int i = 0; i < 3; ++i) rig.store->release_ticket(tickets[i]);
  EXPECT_FALSE(rig.store->wait(tickets.back()).fetched.ids.empty());
  rig.store->release_ticket(tickets.back());
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
