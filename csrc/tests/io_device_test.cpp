// The same cases for every engine: what a caller of BlockDevice and Batch relies on.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "io/aligned_buffer.h"
#include "io/block_device.h"
#include "io/error.h"
#include "io/faulty_device.h"
#include "io/open_device.h"
#include "io/uring_queue.h"
#include "tests/stand_ins.h"

namespace swarm_kv::io {
namespace {

using namespace std::chrono_literals;

constexpr auto kTimeout = 20s;
constexpr uint64_t kCapacity = 8U << 20;

std::vector<std::byte> noise(std::size_t bytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> data(bytes);
  for (std::byte& each : data) each = static_cast<std::byte>(random());
  return data;
}

std::shared_ptr<std::byte> page_buffer(std::size_t bytes) { return allocate_aligned(bytes, 4096); }

template <typename Function>
std::string error_of(ErrorKind kind, Function function) {
  try {
    function();
  } catch (const Error& error) {
    EXPECT_EQ(static_cast<int>(error.kind()), static_cast<int>(kind)) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error was thrown";
  return {};
}

struct EngineCase {
  std::string name;
  std::string engine;
  bool shared_ring = true;
  bool direct = true;
  bool faulty = false;  // behind a FaultyDevice without rules
};

class EngineTest : public testing::TestWithParam<EngineCase> {
 protected:
  void SetUp() override {
    if (GetParam().engine == "io_uring" && UringQueue::probe() != 0) {
      GTEST_SKIP() << "io_uring is refused here: " << std::strerror(UringQueue::probe());
    }
    if (GetParam().engine == "gds") load_stand_in(SWARM_KV_CUFILE_STAND_IN);
    std::string name = std::filesystem::temp_directory_path() / "swarm_kv_io_XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    directory_ = name;
  }
  void TearDown() override {
    if (!directory_.empty()) std::filesystem::remove_all(directory_);
  }

  std::vector<std::shared_ptr<BlockDevice>> open(std::size_t count, uint32_t depth = 128) {
    std::vector<DeviceOptions> options(count);
    for (std::size_t i = 0; i < count; ++i) {
      options[i].path = directory_;
      options[i].engine = GetParam().engine;
      options[i].direct = GetParam().direct;
      options[i].queue_depth = depth;
      options[i].threads = 4;
      options[i].label = "drive" + std::to_string(i);
      options[i].timeout = kTimeout;
    }
    auto devices = open_devices(options, GetParam().shared_ring);
    for (auto& device : devices) {
      EXPECT_EQ(device->engine(), GetParam().engine);  // none has fallen back to another
      if (GetParam().faulty) device = std::make_shared<FaultyDevice>(device);
      device->reserve(kCapacity);
    }
    return devices;
  }

  std::string directory_;
};

TEST_P(EngineTest, AlignedRoundTrip) {
  const auto device = open(1)[0];
  const auto data = noise(1U << 20, 1);
  device->write(4096, data);
  std::vector<std::byte> back(data.size());
  device->read(4096, back);
  EXPECT_EQ(back, data);
  // Negative control: neighbouring bytes are other ones.
  device->read(4096 + 512, back);
  EXPECT_NE(back, data);
}

TEST_P(EngineTest, UnalignedRangesLeaveTheirNeighboursAlone) {
  const auto device = open(1)[0];
  std::vector<std::byte> expected = noise(kCapacity, 2);
  device->write(0, expected);
  const std::pair<uint64_t, std::size_t> ranges[] = {{1, 1},
                                                     {511, 2},
                                                     {4095, 1},
                                                     {700, 100},
                                                     {512, 513},
                                                     {1023, 512},
                                                     {5000, 123457},
                                                     {1U << 20, 7},
                                                     {kCapacity - 3, 3},
                                                     {3, (5U << 20) + 1},
                                                     {0, 511},
                                                     {4096, 4096},
                                                     {100, 4096},
                                                     {kCapacity - 4097, 4097}};
  uint32_t seed = 10;
  for (const auto& [offset, length] : ranges) {
    const auto data = noise(length, seed++);
    device->write(offset, data);
    std::copy(data.begin(), data.end(), expected.begin() + static_cast<std::ptrdiff_t>(offset));
    std::vector<std::byte> back(length);
    device->read(offset, back);
    ASSERT_EQ(back, data) << offset << "+" << length;
  }
  std::vector<std::byte> all(kCapacity);
  device->read(0, all);
  EXPECT_TRUE(all == expected);
}

TEST_P(EngineTest, OddAddressesAreBounced) {
  const auto device = open(1)[0];
  const auto memory = page_buffer(3 * 4096);
  const auto data = noise(8192, 3);
  std::memcpy(memory.get() + 3, data.data(), data.size());
  device->write(0, {memory.get() + 3, data.size()});
  std::vector<std::byte> back(data.size() + 1);
  device->read(0, {back.data() + 1, data.size()});
  EXPECT_EQ(0, std::memcmp(back.data() + 1, data.data(), data.size()));
}

TEST_P(EngineTest, LongTransfersAreSplit) {
  const auto device = open(1)[0];
  const uint32_t bytes = 5U << 20;
  ASSERT_LT(device->geometry().max_transfer, bytes);
  const auto data = noise(bytes, 4);
  const auto memory = page_buffer(bytes);
  std::memcpy(memory.get(), data.data(), bytes);
  Batch batch;
  batch.add(*device, OpKind::kWrite, 4096, memory.get(), bytes);
  batch.submit();
  batch.wait(kTimeout);
  std::memset(memory.get(), 0, bytes);
  batch.add(*device, OpKind::kRead, 4096, memory.get(), bytes);
  batch.submit();
  batch.wait(kTimeout);
  EXPECT_EQ(0, std::memcmp(memory.get(), data.data(), bytes));
  EXPECT_EQ(device->counters().writes, 5U);
  EXPECT_EQ(device->counters().read_bytes, bytes);
}

TEST_P(EngineTest, BatchDeeperThanTheQueue) {
  const auto device = open(1, 4)[0];
  const auto data = noise(kCapacity, 5);
  device->write(0, data);
  constexpr uint32_t kBytes = 4096;
  constexpr std::size_t kReads = 1000;
  const auto memory = page_buffer(kReads * kBytes);
  std::mt19937 random(6);
  std::vector<uint64_t> offsets;
  Batch batch;
  for (std::size_t i = 0; i < kReads; ++i) {
    offsets.push_back(random() % (kCapacity / kBytes) * kBytes);
    batch.add(*device, OpKind::kRead, offsets.back(), memory.get() + i * kBytes, kBytes);
  }
  batch.submit();
  batch.wait(kTimeout);
  for (std::size_t i = 0; i < kReads; ++i) {
    ASSERT_EQ(0, std::memcmp(memory.get() + i * kBytes, data.data() + offsets[i], kBytes)) << i;
  }
}

TEST_P(EngineTest, ManyDrivesInOneBatch) {
  const auto devices = open(8, 8);
  constexpr uint32_t kBytes = 16U << 10;
  constexpr std::size_t kEach = 40;
  const auto memory = page_buffer(devices.size() * kEach * kBytes);
  const auto data = noise(devices.size() * kEach * kBytes, 7);
  Batch batch;
  for (const OpKind kind : {OpKind::kWrite, OpKind::kRead}) {
    if (kind == OpKind::kWrite) {
      std::memcpy(memory.get(), data.data(), data.size());
    } else {
      std::memset(memory.get(), 0, data.size());
    }
    for (std::size_t i = 0; i < kEach * devices.size(); ++i) {
      batch.add(*devices[i % devices.size()], kind, i / devices.size() * kBytes,
                memory.get() + i * kBytes, kBytes);
    }
    EXPECT_EQ(batch.size(), kEach * devices.size());
    batch.submit();
    batch.wait(kTimeout);
  }
  EXPECT_EQ(0, std::memcmp(memory.get(), data.data(), data.size()));
  for (const auto& device : devices) EXPECT_EQ(device->counters().reads, kEach);
}

TEST_P(EngineTest, PollTellsCompletion) {
  const auto devices = open(2);
  const auto memory = page_buffer(2 * 4096);
  std::memset(memory.get(), 0x11, 2 * 4096);
  Batch batch;
  EXPECT_TRUE(batch.poll());
  batch.add(*devices[0], OpKind::kWrite, 0, memory.get(), 4096);
  batch.add(*devices[1], OpKind::kWrite, 0, memory.get() + 4096, 4096);
  batch.submit();
  const auto give_up = std::chrono::steady_clock::now() + kTimeout;
  while (!batch.poll() && std::chrono::steady_clock::now() < give_up) {
    std::this_thread::sleep_for(100us);
  }
  EXPECT_TRUE(batch.poll());
  EXPECT_FALSE(batch.in_flight());
  batch.wait(0ms);
  EXPECT_TRUE(batch.failures().empty());
}

TEST_P(EngineTest, DestroyingABatchWaits) {
  const auto device = open(1)[0];
  const auto data = noise(1U << 20, 8);
  {
    const auto memory = page_buffer(data.size());
    std::memcpy(memory.get(), data.data(), data.size());
    Batch batch;
    batch.add(*device, OpKind::kWrite, 0, memory.get(), static_cast<uint32_t>(data.size()));
    batch.submit();
  }
  std::vector<std::byte> back(data.size());
  device->read(0, back);
  EXPECT_EQ(back, data);
}

TEST_P(EngineTest, BatchOutlivesTheCallersDevice) {
  auto devices = open(1);
  const auto memory = page_buffer(4096);
  Batch batch;
  batch.add(*devices[0], OpKind::kRead, 0, memory.get(), 4096);
  batch.submit();
  devices.clear();
  batch.wait(kTimeout);
}

TEST_P(EngineTest, BadArgumentsAreNamed) {
  const auto device = open(1)[0];
  const auto memory = page_buffer(2 * 4096);
  Batch batch;
  const auto add = [&](uint64_t offset, std::size_t address, uint32_t length) {
    return error_of(ErrorKind::kArgument, [&] {
      batch.add(*device, OpKind::kRead, offset, memory.get() + address, length);
    });
  };
  EXPECT_NE(add(1, 0, 4096).find("offset 1 "), std::string::npos);
  EXPECT_NE(add(0, 0, 100).find("100 bytes"), std::string::npos);
  EXPECT_NE(add(0, 1, 4096).find("memory alignment"), std::string::npos);
  add(0, 0, 0);
  EXPECT_NE(add(kCapacity, 0, 4096).find("capacity of " + std::to_string(kCapacity)),
            std::string::npos);
  add(UINT64_MAX - 4095, 0, 4096);
  std::vector<std::byte> out(2);
  error_of(ErrorKind::kArgument, [&] { device->read(kCapacity - 1, out); });
  error_of(ErrorKind::kArgument, [&] { device->write(UINT64_MAX, out); });
  EXPECT_EQ(batch.size(), 0U);
  batch.add(*device, OpKind::kRead, 0, memory.get(), 4096);
  batch.wait(kTimeout);
}

TEST_P(EngineTest, ReserveGrowsAndKeepsData) {
  const auto device = open(1)[0];
  const auto data = noise(10000, 9);
  device->write(kCapacity - data.size(), data);
  device->reserve(3 * kCapacity + 1);
  EXPECT_GE(device->capacity(), 3 * kCapacity + 1);
  EXPECT_EQ(device->capacity() % device->geometry().block, 0U);
  device->reserve(1);
  EXPECT_GE(device->capacity(), 3 * kCapacity + 1);
  std::vector<std::byte> back(data.size());
  device->read(kCapacity - data.size(), back);
  EXPECT_EQ(back, data);
  device->write(3 * kCapacity - 5000, data.size() > 5000 ? std::span(data).first(5000) : data);
  device->flush();
}

TEST_P(EngineTest, CountersAndPercentiles) {
  const auto device = open(1)[0];
  const auto memory = page_buffer(4096);
  std::memset(memory.get(), 0, 4096);
  Batch batch;
  for (int i = 0; i < 10; ++i) {
    batch.add(*device, OpKind::kWrite, 0, memory.get(), 4096);
    batch.wait(kTimeout);
    batch.add(*device, OpKind::kRead, 0, memory.get(), 4096);
    batch.wait(kTimeout);
  }
  const Counters counters = device->counters();
  EXPECT_EQ(counters.reads, 10U);
  EXPECT_EQ(counters.writes, 10U);
  EXPECT_EQ(counters.read_bytes, 40960U);
  EXPECT_EQ(counters.write_bytes, 40960U);
  EXPECT_EQ(counters.errors, 0U);
  EXPECT_EQ(counters.short_transfers, 0U);
  EXPECT_GT(counters.read_p50_us, 0);
  EXPECT_LE(counters.read_p50_us, counters.read_p99_us);
  EXPECT_LT(counters.read_p99_us, 20e6);
  EXPECT_GT(counters.write_p99_us, 0);
}

TEST_P(EngineTest, RegisteredBuffersGiveTheSameBytes) {
  const auto devices = open(2);
  const std::size_t bytes = 256U << 10;
  const auto memory = page_buffer(bytes);
  const std::span region(memory.get(), bytes);
  const auto data = noise(bytes, 11);
  for (const auto& device : devices) {
    const bool registered = device->register_buffer(region);
    if (GetParam().engine == "io_uring") {
      EXPECT_TRUE(registered || !device->notes().empty());  // a refusal is explained
    } else {
      EXPECT_EQ(registered, GetParam().engine == "gds");
    }
    std::memcpy(memory.get(), data.data(), bytes);
    Batch batch;
    batch.add(*device, OpKind::kWrite, 0, memory.get(), static_cast<uint32_t>(bytes));
    batch.wait(kTimeout);
    std::memset(memory.get(), 0, bytes);
    batch.add(*device, OpKind::kRead, 0, memory.get(), static_cast<uint32_t>(bytes));
    batch.wait(kTimeout);
    EXPECT_EQ(0, std::memcmp(memory.get(), data.data(), bytes));
  }
  for (const auto& device : devices) device->unregister_buffer(region);
  devices[0]->unregister_buffer(region);  // once too often
  Batch batch;
  std::memset(memory.get(), 0, bytes);
  batch.add(*devices[0], OpKind::kRead, 0, memory.get(), static_cast<uint32_t>(bytes));
  batch.wait(kTimeout);
  EXPECT_EQ(0, std::memcmp(memory.get(), data.data(), bytes));
}

TEST_P(EngineTest, TwoThreadsUseTheSameDrives) {
  const auto devices = open(3, 8);
  constexpr uint32_t kBytes = 4096;
  constexpr std::size_t kReads = 48;
  const auto data = noise(1U << 20, 12);
  for (const auto& device : devices) device->write(0, data);
  std::atomic<int> wrong{0};
  const auto work = [&](uint32_t seed, uint64_t own) {
    std::mt19937 random(seed);
    const auto memory = page_buffer(kReads * kBytes);
    const auto written = page_buffer(kBytes);
    for (int round = 0; round < 60; ++round) {
      std::vector<uint64_t> offsets;
      Batch batch;
      for (std::size_t i = 0; i < kReads; ++i) {
        offsets.push_back(random() % (data.size() / kBytes) * kBytes);
        batch.add(*devices[i % devices.size()], OpKind::kRead, offsets[i],
                  memory.get() + i * kBytes, kBytes);
      }
      std::memset(written.get(), round, kBytes);
      batch.add(*devices[0], OpKind::kWrite, own, written.get(), kBytes);
      batch.submit();
      batch.wait(kTimeout);
      for (std::size_t i = 0; i < kReads; ++i) {
        wrong += std::memcmp(memory.get() + i * kBytes, data.data() + offsets[i], kBytes) != 0;
      }
      std::byte one;
      devices[0]->read(own + 17, {&one, 1});
      wrong += one != static_cast<std::byte>(round);
    }
  };
  std::thread other(work, 1, 2U << 20);
  work(2, 3U << 20);
  other.join();
  EXPECT_EQ(wrong, 0);
}

TEST_P(EngineTest, BatchMovesBetweenThreads) {
  // Submitted by a thread that ends before the batch is waited for.
  const auto devices = open(2, 4);
  constexpr uint32_t kBytes = 64U << 10;
  const auto data = noise(1U << 20, 13);
  for (const auto& device : devices) device->write(0, data);
  const auto memory = page_buffer(data.size());
  Batch batch;
  std::thread submitter([&] {
    for (uint32_t at = 0; at < data.size(); at += kBytes) {
      batch.add(*devices[at / kBytes % 2], OpKind::kRead, at, memory.get() + at, kBytes);
    }
    batch.submit();
  });
  submitter.join();
  batch.wait(kTimeout);
  EXPECT_EQ(0, std::memcmp(memory.get(), data.data(), data.size()));
}

TEST_P(EngineTest, ForkedChildIsRefused) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer does not follow fork() with threads";
#endif
  const auto device = open(1)[0];
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::byte one;
    try {
      device->read(0, {&one, 1});
    } catch (const Error& error) {
      _exit(error.kind() == ErrorKind::kState ? 0 : 2);
    }
    _exit(1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  std::byte one;
  device->read(0, {&one, 1});
}

TEST_P(EngineTest, NothingIsLeftInTheDirectory) {
  const auto device = open(1)[0];
  device->write(0, noise(4096, 14));
  EXPECT_TRUE(std::filesystem::is_empty(directory_));
}

TEST_P(EngineTest, CapacityLimitHolds) {
  DeviceOptions options;
  options.path = directory_;
  options.engine = GetParam().engine;
  options.label = "small";
  options.capacity_limit = 1U << 20;
  const auto device = open_devices({options}, GetParam().shared_ring)[0];
  device->reserve(1U << 20);
  const std::string text = error_of(ErrorKind::kStorage, [&] { device->reserve((1U << 20) + 1); });
  EXPECT_NE(text.find("'small'"), std::string::npos) << text;
  EXPECT_NE(text.find("1048576"), std::string::npos) << text;
  EXPECT_EQ(device->capacity(), 1U << 20);
}

TEST_P(EngineTest, ProbeGivesAPositiveModel) {
  const auto device = open(1)[0];
  const DeviceModel model = measure_device(*device);
  EXPECT_GT(model.t_base, 0);
  EXPECT_GT(model.t_transfer, 0);
  EXPECT_LT(model.seconds(1, 4096), 1);
  ProbeOptions beyond;
  beyond.scratch_offset = kCapacity;
  if (!device->exact_model()) {
    error_of(ErrorKind::kArgument, [&] { measure_device(*device, beyond); });
  }
}

INSTANTIATE_TEST_SUITE_P(
    Engines, EngineTest,
    testing::Values(EngineCase{"io_uring_shared", "io_uring"},
                    EngineCase{"io_uring_each", "io_uring", false},
                    EngineCase{"io_uring_buffered", "io_uring", true, false},
                    EngineCase{"threads", "threads"},
                    EngineCase{"threads_buffered", "threads", true, false},
                    EngineCase{"gds", "gds"}, EngineCase{"gds_buffered", "gds", true, false},
                    EngineCase{"memory", "memory"}, EngineCase{"simulated", "simulated"},
                    EngineCase{"faulty_io_uring", "io_uring", true, true, true},
                    EngineCase{"faulty_threads", "threads", true, true, true},
                    EngineCase{"faulty_memory", "memory", true, true, true}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace swarm_kv::io
