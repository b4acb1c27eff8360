// One io_uring shared by all drives against one ring per drive: k IOPS and CPU per request of
// batches of random reads spread over the drives. Prints JSON.
//   rings_bench PATH...   directories or raw: paths; they are used in turn to make up the drives
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <string>
#include <vector>

#include "io/aligned_buffer.h"
#include "io/open_device.h"

namespace {

using swarm_kv::io::allocate_aligned;
using swarm_kv::io::Batch;
using swarm_kv::io::BlockDevice;
using swarm_kv::io::DeviceOptions;
using swarm_kv::io::OpKind;
using Clock = std::chrono::steady_clock;

constexpr uint64_t kDriveBytes = 64U << 20;
constexpr int kRepetitions = 7;
constexpr std::chrono::milliseconds kRunTime{300};
constexpr uint32_t kMaxBatch = 128;

struct Result {
  double kiops;
  double cpu_us;
};

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

using Drives = std::vector<std::shared_ptr<BlockDevice>>;

Drives open_drives(const std::vector<std::string>& paths, std::size_t count, bool shared_ring) {
  std::vector<DeviceOptions> options(count);
  for (std::size_t i = 0; i < count; ++i) {
    options[i].path = paths[i % paths.size()];
    options[i].engine = "io_uring";
  }
  Drives drives = swarm_kv::io::open_devices(options, shared_ring);
  const std::vector<std::byte> data(4U << 20, std::byte{0x33});
  for (const auto& drive : drives) {
    drive->reserve(kDriveBytes);
    for (uint64_t at = 0; at < kDriveBytes; at += data.size()) drive->write(at, data);
    drive->flush();
  }
  return drives;
}

Result run(const Drives& drives, uint32_t batch_size, uint32_t bytes, std::byte* memory,
           std::mt19937& random) {
  uint64_t requests = 0;
  const double cpu = cpu_seconds();
  const auto start = Clock::now();
  Batch batch;
  while (Clock::now() - start < kRunTime) {
    for (uint32_t i = 0; i < batch_size; ++i) {
      const uint64_t block = random() % (kDriveBytes / bytes);
      batch.add(*drives[i % drives.size()], OpKind::kRead, block * bytes,
                memory + static_cast<std::size_t>(i) * bytes, bytes);
    }
    batch.submit();
    batch.wait(std::chrono::seconds(30));
    requests += batch_size;
  }
  const std::chrono::duration<double> wall = Clock::now() - start;
  const auto done = static_cast<double>(requests);
  return {done / wall.count() * 1e-3, (cpu_seconds() - cpu) / done * 1e6};
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void compare(const std::vector<std::string>& paths) {
  const auto memory = allocate_aligned(static_cast<std::size_t>(kMaxBatch) * (16U << 10), 4096);
  std::mt19937 random(1);
  const char* separator = "";
  std::printf("[");
  for (const std::size_t count : {4, 8}) {
    const Drives drives[2] = {open_drives(paths, count, false), open_drives(paths, count, true)};
    for (const uint32_t bytes : {4U << 10, 16U << 10}) {
      for (const uint32_t batch_size : {16U, 32U, 64U, kMaxBatch}) {
        std::vector<double> kiops[2];
        std::vector<double> cpu_us[2];
        for (int repetition = 0; repetition < kRepetitions; ++repetition) {
          // Both kinds in each repetition, so that a busy moment hits them alike.
          for (const int shared : {repetition % 2, 1 - repetition % 2}) {
            const Result result = run(drives[shared], batch_size, bytes, memory.get(), random);
            kiops[shared].push_back(result.kiops);
            cpu_us[shared].push_back(result.cpu_us);
          }
        }
        std::printf(
            "%s\n {\"drives\": %zu, \"bytes\": %u, \"batch\": %u, \"shared_kiops\": %.1f, "
            "\"per_drive_kiops\": %.1f, \"shared_cpu_us\": %.2f, \"per_drive_cpu_us\": %.2f}",
            separator, count, bytes, batch_size, median(kiops[1]), median(kiops[0]),
            median(cpu_us[1]), median(cpu_us[0]));
        std::fflush(stdout);
        separator = ",";
      }
    }
  }
  std::printf("\n]\n");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s PATH...\n", argv[0]);
    return 2;
  }
  try {
    compare({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
