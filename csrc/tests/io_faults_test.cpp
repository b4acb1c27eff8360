// What becomes of transfers that go wrong: never a wrong byte that counts as right, never a buffer
// that is written after the caller got it back.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "io/aligned_buffer.h"
#include "io/error.h"
#include "io/faulty_device.h"
#include "io/open_device.h"
#include "io/simulated_device.h"

namespace swarm_kv::io {
namespace {

using namespace std::chrono_literals;

constexpr auto kTimeout = 20s;
constexpr uint32_t kBytes = 16U << 10;

std::vector<std::byte> noise(std::size_t bytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> data(bytes);
  for (std::byte& each : data) each = static_cast<std::byte>(random());
  return data;
}

struct Faulty : testing::Test {
  Faulty() {
    DeviceOptions options;
    options.engine = "memory";
    options.label = "nvme7";
    options.timeout = kTimeout;
    device = std::make_shared<FaultyDevice>(open_devices({options})[0]);
    device->reserve(1U << 20);
    device->write(0, data);
  }

  bool buffer_is_right() const { return std::memcmp(buffer.get(), data.data(), kBytes) == 0; }
  void clear_buffer() { std::memset(buffer.get(), 0, kBytes); }
  void start_read(Batch& batch) {
    clear_buffer();
    batch.add(*device, OpKind::kRead, 0, buffer.get(), kBytes);
    batch.submit();
  }
  std::string wait_fails(Batch& batch, std::chrono::milliseconds timeout = kTimeout) {
    try {
      batch.wait(timeout);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kStorage);
      return error.what();
    }
    ADD_FAILURE() << "wait() did not throw";
    return {};
  }

  std::vector<std::byte> data = noise(1U << 20, 1);
  std::shared_ptr<std::byte> buffer = allocate_aligned(kBytes, 4096);
  std::shared_ptr<FaultyDevice> device;
};

TEST_F(Faulty, ShortReadsAreCompleted) {
  // Ends on a block, inside a block, after nearly everything, and after nothing (once only).
  for (const uint32_t keep : {512U, 8192U, 1000U, kBytes - 1, 0U}) {
    device->clear_rules();
    device->add_rule({.fault = FaultKind::kShort, .kind = OpKind::kRead, .keep = keep});
    const uint64_t before = device->counters().short_transfers;
    Batch batch;
    start_read(batch);
    batch.wait(kTimeout);
    EXPECT_TRUE(buffer_is_right()) << keep;
    EXPECT_EQ(device->counters().short_transfers, before + 1) << keep;
  }
}

TEST_F(Faulty, EveryReadShortStillCompletes) {
  device->add_rule(
      {.fault = FaultKind::kShort, .kind = OpKind::kRead, .count = UINT32_MAX, .keep = 700});
  Batch batch;
  start_read(batch);
  batch.wait(kTimeout);
  EXPECT_TRUE(buffer_is_right());
  EXPECT_EQ(device->counters().short_transfers, kBytes / 512 - 1);
}

TEST_F(Faulty, ShortWritesAreCompleted) {
  const auto fresh = noise(kBytes, 2);
  std::memcpy(buffer.get(), fresh.data(), kBytes);
  device->add_rule({.fault = FaultKind::kShort, .kind = OpKind::kWrite, .count = 3, .keep = 4000});
  Batch batch;
  batch.add(*device, OpKind::kWrite, 0, buffer.get(), kBytes);
  batch.wait(kTimeout);
  std::vector<std::byte> back(kBytes);
  device->read(0, back);
  EXPECT_EQ(back, fresh);
}

TEST_F(Faulty, NoProgressTwiceIsAnError) {
  device->add_rule({.fault = FaultKind::kShort, .kind = OpKind::kRead, .count = 2, .keep = 0});
  Batch batch;
  start_read(batch);
  EXPECT_NE(wait_fails(batch).find("nvme7"), std::string::npos);
  ASSERT_EQ(batch.failures().size(), 1U);
  EXPECT_EQ(batch.failures()[0].error, EIO);
  // Without the fault the same batch object works again.
  start_read(batch);
  batch.wait(kTimeout);
  EXPECT_TRUE(buffer_is_right());
  EXPECT_TRUE(batch.failures().empty());
}

TEST_F(Faulty, ErrorNamesDriveOffsetAndLength) {
  device->add_rule({.kind = OpKind::kRead, .offset = 3 * kBytes, .length = 1, .error = EIO});
  const auto memory = allocate_aligned(8 * kBytes, 4096);
  Batch batch;
  for (uint32_t i = 0; i < 8; ++i) {
    batch.add(*device, OpKind::kRead, i * kBytes, memory.get() + i * kBytes, kBytes);
  }
  const std::string text = wait_fails(batch);
  EXPECT_NE(text.find("'nvme7'"), std::string::npos) << text;
  EXPECT_NE(text.find("16384 bytes at offset 49152"), std::string::npos) << text;
  EXPECT_NE(text.find("Input/output error (errno 5)"), std::string::npos) << text;
  EXPECT_NE(text.find("1 of 8"), std::string::npos) << text;
  ASSERT_EQ(batch.failures().size(), 1U);
  const Failure& failure = batch.failures()[0];
  EXPECT_EQ(failure.index, 3U);
  EXPECT_EQ(failure.device, device);
  EXPECT_EQ(failure.offset, 3 * kBytes);
  EXPECT_EQ(failure.length, kBytes);
  EXPECT_EQ(failure.data, memory.get() + 3 * kBytes);
  EXPECT_EQ(device->counters().errors, 1U);
  // The others are whole.
  EXPECT_EQ(0, std::memcmp(memory.get(), data.data(), 3 * kBytes));
  EXPECT_EQ(0, std::memcmp(memory.get() + 4 * kBytes, data.data() + 4 * kBytes, 4 * kBytes));
}

TEST_F(Faulty, OneFailureForEachAddHoweverOftenItWasSplit) {
  device->reserve(8U << 20);
  device->add_rule({.kind = OpKind::kWrite, .count = UINT32_MAX, .error = EIO});
  const uint32_t bytes = 4U << 20;
  const auto memory = allocate_aligned(bytes, 4096);
  std::memset(memory.get(), 1, bytes);
  Batch batch;
  batch.add(*device, OpKind::kWrite, 0, memory.get(), bytes);
  wait_fails(batch);
  ASSERT_EQ(batch.failures().size(), 1U);
  EXPECT_EQ(batch.failures()[0].length, bytes);
}

TEST_F(Faulty, BlockingCallsThrowAsWell) {
  device->add_rule({.kind = OpKind::kWrite, .error = ENOSPC});
  try {
    device->write(100, std::span(data).first(100));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kStorage);
    EXPECT_NE(std::string(error.what()).find("No space left"), std::string::npos) << error.what();
  }
  std::vector<std::byte> back(4096);
  device->read(0, back);
  EXPECT_TRUE(std::equal(back.begin(), back.end(), data.begin()));
}

TEST_F(Faulty, InterruptedTransfersStartAgain) {
  for (const int error : {EINTR, EAGAIN, ECANCELED}) {
    device->add_rule({.kind = OpKind::kRead, .count = 5, .error = error});
    Batch batch;
    start_read(batch);
    batch.wait(kTimeout);
    EXPECT_TRUE(buffer_is_right());
  }
  EXPECT_EQ(device->faults(), 15U);
  EXPECT_EQ(device->counters().errors, 0U);
  // But not for ever.
  device->add_rule({.kind = OpKind::kRead, .count = UINT32_MAX, .error = EAGAIN});
  Batch batch;
  start_read(batch);
  wait_fails(batch);
}

TEST_F(Faulty, TornWritesAndFlippedBitsAreNotNoticedHere) {
  // They are the checksums' business in the layer above; this is the control that they do happen.
  const auto fresh = noise(kBytes, 3);
  device->add_rule({.fault = FaultKind::kTorn, .kind = OpKind::kWrite, .keep = 4096});
  device->write(0, fresh);
  std::vector<std::byte> back(kBytes);
  device->read(0, back);
  EXPECT_TRUE(std::equal(back.begin(), back.begin() + 4096, fresh.begin()));
  EXPECT_TRUE(std::equal(back.begin() + 4096, back.end(), data.begin() + 4096));
  device->write(0, fresh);
  device->add_rule({.fault = FaultKind::kCorrupt, .kind = OpKind::kRead});
  device->read(0, back);
  EXPECT_NE(back, fresh);
  device->read(0, back);
  EXPECT_EQ(back, fresh);
  device->add_rule({.fault = FaultKind::kCorrupt, .kind = OpKind::kWrite});
  const auto before = fresh;
  device->write(0, fresh);
  EXPECT_EQ(before, fresh);
  device->read(0, back);
  EXPECT_NE(back, fresh);
}

TEST_F(Faulty, TimeOutCancelsAndLeavesTheBufferAlone) {
  device->add_rule({.fault = FaultKind::kHold, .kind = OpKind::kRead});
  Batch batch;
  start_read(batch);
  EXPECT_FALSE(batch.poll());
  const std::string text = wait_fails(batch, 30ms);  // would wait for ever
  EXPECT_NE(text.find("timed out"), std::string::npos) << text;
  ASSERT_EQ(batch.failures().size(), 1U);
  EXPECT_EQ(batch.failures()[0].error, ETIMEDOUT);
  EXPECT_FALSE(batch.in_flight());
  std::memset(buffer.get(), 0x77, kBytes);
  // A read that was left in the line would run now, and before the next one.
  device->clear_rules();
  std::vector<std::byte> other(kBytes);
  device->read(0, other);
  EXPECT_TRUE(std::all_of(buffer.get(), buffer.get() + kBytes,
                          [](std::byte each) { return each == std::byte{0x77}; }));
  start_read(batch);
  batch.wait(kTimeout);
  EXPECT_TRUE(buffer_is_right());
}

TEST_F(Faulty, WithoutKeptMemoryTheTimeOutWaitsForTheDrive) {
  device->add_rule(
      {.fault = FaultKind::kDelay, .kind = OpKind::kRead, .delay = 300ms, .cancellable = false});
  Batch batch;
  const auto start = std::chrono::steady_clock::now();
  start_read(batch);
  batch.wait(20ms);  // every byte arrived in the end, so it counts
  EXPECT_GE(std::chrono::steady_clock::now() - start, 250ms);
  EXPECT_TRUE(buffer_is_right());
}

TEST_F(Faulty, KeptMemoryLivesUntilTheDriveLetsGo) {
  device->add_rule({.fault = FaultKind::kHold, .kind = OpKind::kRead, .cancellable = false});
  std::weak_ptr<std::byte> watch;
  Batch batch;
  {
    auto memory = allocate_aligned(kBytes, 4096);
    watch = memory;
    batch.keep(memory);
    batch.add(*device, OpKind::kRead, 0, memory.get(), kBytes);
    batch.submit();
  }
  wait_fails(batch, 20ms);  // would wait for ever
  EXPECT_EQ(batch.failures()[0].error, ETIMEDOUT);
  EXPECT_FALSE(watch.expired());
  // The batch is free for other memory at once, and the drive goes on.
  start_read(batch);
  batch.wait(kTimeout);
  EXPECT_TRUE(buffer_is_right());
  EXPECT_FALSE(watch.expired());
  device->clear_rules();
  const auto give_up = std::chrono::steady_clock::now() + kTimeout;
  while (!watch.expired() && std::chrono::steady_clock::now() < give_up) {
    std::this_thread::sleep_for(5ms);
  }
  EXPECT_TRUE(watch.expired());
}

TEST_F(Faulty, AbandonedTransfersOutliveDriveAndBatch) {
  device->add_rule({.fault = FaultKind::kHold, .kind = OpKind::kRead, .cancellable = false});
  std::weak_ptr<FaultyDevice> watch = device;
  {
    Batch batch;
    auto memory = allocate_aligned(kBytes, 4096);
    batch.keep(memory);
    batch.add(*device, OpKind::kRead, 0, memory.get(), kBytes);
    wait_fails(batch, 10ms);
  }
  device.reset();
  ASSERT_FALSE(watch.expired());
  watch.lock()->clear_rules();
  const auto give_up = std::chrono::steady_clock::now() + kTimeout;
  while (!watch.expired() && std::chrono::steady_clock::now() < give_up) {
    std::this_thread::sleep_for(5ms);
  }
  EXPECT_TRUE(watch.expired());
}

TEST_F(Faulty, BlockingReadOfAHungDriveThrows) {
  DeviceOptions options;
  options.engine = "memory";
  options.timeout = 50ms;
  const auto slow = std::make_shared<FaultyDevice>(open_devices({options})[0]);
  slow->reserve(1U << 20);
  slow->add_rule({.fault = FaultKind::kHold, .kind = OpKind::kRead});
  std::vector<std::byte> out(1000);
  EXPECT_THROW(slow->read(10, out), Error);  // would wait for ever
}

std::vector<std::shared_ptr<BlockDevice>> simulated(std::size_t count, double t_base,
                                                    double t_transfer) {
  DeviceOptions options;
  options.engine = "simulated";
  options.model = {t_base, t_transfer};
  auto devices = open_devices(std::vector<DeviceOptions>(count, options));
  for (const auto& device : devices) device->reserve(1U << 20);
  return devices;
}

TEST(Simulated, BusySecondsFollowTheModel) {
  const auto devices = simulated(2, 1e-3, 1e-6);
  const auto memory = allocate_aligned(8 * 4096, 4096);
  Batch batch;
  for (uint32_t i = 0; i < 4; ++i) {
    batch.add(*devices[0], OpKind::kRead, i * 4096, memory.get() + i * 4096, 4096);
  }
  batch.add(*devices[1], OpKind::kRead, 0, memory.get() + 4 * 4096, 4096);
  batch.submit();
  auto& first = static_cast<SimulatedDevice&>(*devices[0]);
  EXPECT_DOUBLE_EQ(first.clock().now(), 0);  // nobody has waited yet
  batch.wait(kTimeout);
  EXPECT_DOUBLE_EQ(devices[0]->counters().busy_seconds, 4 * (1e-3 + 4096e-6));
  EXPECT_DOUBLE_EQ(devices[1]->counters().busy_seconds, 1e-3 + 4096e-6);
  // The drives work at the same time: the batch took as long as its busiest drive.
  EXPECT_NEAR(first.clock().now(), 4 * (1e-3 + 4096e-6), 1e-8);
  EXPECT_NEAR(devices[0]->counters().read_p99_us, 4 * (1e3 + 4096), 4 * (1e3 + 4096) * 0.07);
  // A second batch queues behind nothing: it starts at the clock's present.
  batch.add(*devices[1], OpKind::kRead, 0, memory.get(), 4096);
  batch.wait(kTimeout);
  EXPECT_NEAR(first.clock().now(), 5 * (1e-3 + 4096e-6), 1e-8);
}

TEST(Simulated, BatchesInFlightTogetherOverlap) {
  const auto devices = simulated(2, 1e-3, 0);
  const auto memory = allocate_aligned(2 * 4096, 4096);
  Batch one;
  Batch two;
  one.add(*devices[0], OpKind::kRead, 0, memory.get(), 4096);
  two.add(*devices[1], OpKind::kRead, 0, memory.get() + 4096, 4096);
  one.submit();
  two.submit();
  one.wait(kTimeout);
  two.wait(kTimeout);
  EXPECT_NEAR(static_cast<SimulatedDevice&>(*devices[0]).clock().now(), 1e-3, 1e-9);
}

TEST(Simulated, ProbeReturnsTheExactModel) {
  const auto device = simulated(1, 7e-5, 3e-10)[0];
  const DeviceModel model = measure_device(*device);
  EXPECT_DOUBLE_EQ(model.t_base, 7e-5);
  EXPECT_DOUBLE_EQ(model.t_transfer, 3e-10);
  EXPECT_EQ(device->counters().busy_seconds, 0);
}

TEST(Simulated, ImpossibleModelsAreRefused) {
  EXPECT_THROW(simulated(1, -1, 0), Error);
  EXPECT_THROW(simulated(1, 0, std::numeric_limits<double>::quiet_NaN()), Error);
}

TEST(LatencyHistogram, PercentilesAreWithinABucket) {
  LatencyHistogram histogram;
  EXPECT_EQ(histogram.percentile_us(0.5), 0);
  for (uint64_t i = 1; i <= 1000; ++i) histogram.record(i * 1000);
  EXPECT_NEAR(histogram.percentile_us(0.50), 500, 500 * 0.07);
  EXPECT_NEAR(histogram.percentile_us(0.99), 990, 990 * 0.07);
  histogram.record(UINT64_MAX);
  histogram.record(0);
  EXPECT_GT(histogram.percentile_us(1.0), 1e15);
}

}  // namespace
}  // namespace swarm_kv::io
