// What is particular to engine "gds": when it is used, what is said when it is not, and what
// becomes of cuFile's errors. A stand-in library takes cuFile's place.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "io/aligned_buffer.h"
#include "io/cufile_abi.h"
#include "io/error.h"
#include "io/open_device.h"
#include "tests/stand_ins.h"

#if __has_include(<cufile.h>) && __has_include(<cuda.h>)
#include <cufile.h>

#include <type_traits>

// Our declarations are NVIDIA's.
namespace swarm_kv::io::cufile {
static_assert(sizeof(Status) == sizeof(CUfileError_t));
static_assert(offsetof(Status, cuda_error) == offsetof(CUfileError_t, cu_err));
static_assert(sizeof(Description) == sizeof(CUfileDescr_t));
static_assert(offsetof(Description, of) == offsetof(CUfileDescr_t, handle));
static_assert(offsetof(Description, file_system) == offsetof(CUfileDescr_t, fs_ops));
static_assert(static_cast<int>(kOpaqueFd) == CU_FILE_HANDLE_TYPE_OPAQUE_FD);
static_assert(static_cast<int>(kSuccess) == CU_FILE_SUCCESS);
static_assert(static_cast<int>(kDriverNotInitialized) == CU_FILE_DRIVER_NOT_INITIALIZED);
static_assert(static_cast<int>(kPlatformNotSupported) == CU_FILE_PLATFORM_NOT_SUPPORTED);
static_assert(static_cast<int>(kIoNotSupported) == CU_FILE_IO_NOT_SUPPORTED);
static_assert(static_cast<int>(kDeviceNotSupported) == CU_FILE_DEVICE_NOT_SUPPORTED);
static_assert(static_cast<int>(kCudaDriverError) == CU_FILE_CUDA_DRIVER_ERROR);
static_assert(static_cast<int>(kCudaPointerInvalid) == CU_FILE_CUDA_POINTER_INVALID);
static_assert(static_cast<int>(kCudaMemoryTypeInvalid) == CU_FILE_CUDA_MEMORY_TYPE_INVALID);
static_assert(static_cast<int>(kInvalidFileOpenFlag) == CU_FILE_INVALID_FILE_OPEN_FLAG);
static_assert(static_cast<int>(kInvalidValue) == CU_FILE_INVALID_VALUE);
static_assert(static_cast<int>(kMemoryAlreadyRegistered) == CU_FILE_MEMORY_ALREADY_REGISTERED);
static_assert(static_cast<int>(kMemoryNotRegistered) == CU_FILE_MEMORY_NOT_REGISTERED);
static_assert(static_cast<int>(kPermissionDenied) == CU_FILE_PERMISSION_DENIED);
static_assert(static_cast<int>(kDriverAlreadyOpen) == CU_FILE_DRIVER_ALREADY_OPEN);
static_assert(static_cast<int>(kDeviceNotFound) == CU_FILE_DEVICE_NOT_FOUND);
static_assert(static_cast<int>(kNvfsSetupError) == CU_FILE_NVFS_SETUP_ERROR);
static_assert(static_cast<int>(kIoDisabled) == CU_FILE_IO_DISABLED);
static_assert(std::is_same_v<decltype(&cuFileDriverOpen), CUfileError_t (*)()>);
static_assert(std::is_same_v<decltype(&cuFileHandleRegister),
                             CUfileError_t (*)(CUfileHandle_t*, CUfileDescr_t*)>);
static_assert(std::is_same_v<decltype(&cuFileHandleDeregister), HandleDeregister>);
static_assert(
    std::is_same_v<decltype(&cuFileBufRegister), CUfileError_t (*)(const void*, size_t, int)>);
static_assert(std::is_same_v<decltype(&cuFileBufDeregister), CUfileError_t (*)(const void*)>);
static_assert(std::is_same_v<decltype(&cuFileRead), Read>);
static_assert(std::is_same_v<decltype(&cuFileWrite), Write>);
}  // namespace swarm_kv::io::cufile
#endif

namespace swarm_kv::io {
namespace {

using namespace std::chrono_literals;

constexpr auto kTimeout = 20s;
constexpr std::size_t kBytes = 64U << 10;

void set_fault(const char* name) { setenv("SWARM_KV_STAND_IN_FAULT", name, 1); }

std::vector<std::shared_ptr<BlockDevice>> open_drives(std::size_t count = 1) {
  DeviceOptions options;
  options.path = std::filesystem::temp_directory_path();
  options.engine = "gds";
  options.timeout = kTimeout;
  options.threads = 2;
  auto devices = open_devices(std::vector<DeviceOptions>(count, options));
  for (const auto& device : devices) device->reserve(1U << 20);
  return devices;
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

// A drive that fell back does what it is for.
void expect_works(BlockDevice& device) {
  std::mt19937 random(1);
  std::vector<std::byte> data(10000);
  for (std::byte& each : data) each = static_cast<std::byte>(random());
  device.write(77, data);
  std::vector<std::byte> back(data.size());
  device.read(77, back);
  EXPECT_EQ(back, data);
}

// First, as no library that is loaded leaves the process again.
TEST(GdsWithoutTheLibrary, FallsBackAndSaysSo) {
  if (dlopen("libcufile.so.0", RTLD_LAZY) != nullptr) GTEST_SKIP() << "cuFile is installed here";
  const auto device = open_drives()[0];
  EXPECT_NE(device->engine(), "gds");
  ASSERT_FALSE(device->notes().empty());
  expect_contains(device->notes().back(), "cuFile was not found (libcufile.so.0");
  expect_works(*device);
}

class GdsTest : public testing::Test {
 protected:
  void SetUp() override {
    set_fault("");
    library_ = load_stand_in(SWARM_KV_CUFILE_STAND_IN);
  }
  void TearDown() override { set_fault(""); }

  // Of a read of kBytes into `memory`.
  std::string failure_of(BlockDevice& device, const std::shared_ptr<std::byte>& memory,
                         std::chrono::milliseconds timeout = kTimeout) {
    Batch batch;
    batch.keep(memory);
    batch.add(device, OpKind::kRead, 0, memory.get(), kBytes);
    try {
      batch.wait(timeout);
    } catch (const Error& error) {
      return error.what();
    }
    ADD_FAILURE() << "the read did not fail";
    return {};
  }

  void* library_ = nullptr;
  const std::shared_ptr<std::byte> memory_ = allocate_aligned(kBytes, 4096);
};

TEST_F(GdsTest, ReadsGoThroughTheLibrary) {
  auto& reads = *symbol_of<std::atomic<uint64_t>>(library_, "stand_in_reads");
  const auto device = open_drives()[0];
  EXPECT_EQ(device->engine(), "gds");
  EXPECT_TRUE(device->notes().empty());
  const uint64_t before = reads;
  EXPECT_GE(before, 1U);  // the probe's
  expect_works(*device);
  EXPECT_GT(reads, before);
}

struct Refusal {
  std::string fault;
  std::string says;
};

class GdsRefusal : public GdsTest, public testing::WithParamInterface<Refusal> {};

TEST_P(GdsRefusal, FallsBackAndSaysWhyOnce) {
  set_fault(GetParam().fault.c_str());
  const auto devices = open_drives(2);
  for (const auto& device : devices) {
    EXPECT_TRUE(device->engine() == "io_uring" || device->engine() == "threads");
    expect_works(*device);
  }
  ASSERT_EQ(devices[0]->notes().size(), 1U);
  expect_contains(devices[0]->notes()[0], "GPUDirect Storage cannot be used here: ");
  expect_contains(devices[0]->notes()[0], GetParam().says);
  expect_contains(devices[0]->notes()[0],
                  "engine \"" + std::string(devices[0]->engine()) + "\" reads and writes instead");
  EXPECT_TRUE(devices[1]->notes().empty());
}

INSTANTIATE_TEST_SUITE_P(
    All, GdsRefusal,
    testing::Values(Refusal{"driver",
                            "cuFile's driver does not open: its set-up failed, as it "
                            "does without a GPU and its driver (cuFile error 5033)"},
                    Refusal{"handle",
                            "cuFile does not take its files: this file system is not "
                            "supported (cuFile error 5008)"},
                    Refusal{"cufile_error",
                            "cuFileWrite failed: the CUDA driver refused (cuFile "
                            "error 5011"},
                    Refusal{"errno", "cuFileWrite failed: No such device (errno 19)"},
                    Refusal{"corrupt", "cuFileRead gave other bytes than the file has"}),
    [](const auto& info) { return info.param.fault; });

TEST_F(GdsTest, ShortTransfersAreCompleted) {
  const auto device = open_drives()[0];
  expect_works(*device);
  EXPECT_EQ(device->counters().short_transfers, 0U);
  set_fault("short");
  expect_works(*device);
  EXPECT_GT(device->counters().short_transfers, 0U);
}

TEST_F(GdsTest, ErrorsReachTheCaller) {
  const auto device = open_drives()[0];
  set_fault("errno");
  expect_contains(failure_of(*device, memory_), "No such device (errno 19)");
  EXPECT_TRUE(device->notes().empty());
  set_fault("cufile_error");
  expect_contains(failure_of(*device, memory_), "(errno 5)");
  ASSERT_EQ(device->notes().size(), 1U);
  expect_contains(device->notes()[0], "cuFileRead failed: the CUDA driver refused");
  set_fault("");
  expect_works(*device);
}

TEST_F(GdsTest, SlowReadsTimeOutAndKeepTheirMemory) {
  const auto device = open_drives()[0];
  std::weak_ptr<std::byte> watch;
  {
    const auto memory = allocate_aligned(kBytes, 4096);
    watch = memory;
    set_fault("slow");
    expect_contains(failure_of(*device, memory, 20ms), "timed out");
  }
  EXPECT_FALSE(watch.expired());
  const auto give_up = std::chrono::steady_clock::now() + kTimeout;
  while (!watch.expired() && std::chrono::steady_clock::now() < give_up) {
    std::this_thread::sleep_for(5ms);
  }
  EXPECT_TRUE(watch.expired());
}

TEST_F(GdsTest, BuffersThatAreRefusedAreUsedAllTheSame) {
  const auto device = open_drives()[0];
  set_fault("buffer");
  EXPECT_FALSE(device->register_buffer({memory_.get(), kBytes}));
  ASSERT_EQ(device->notes().size(), 1U);
  expect_contains(device->notes()[0],
                  "65536 bytes of buffers are not registered with cuFile: the "
                  "CUDA driver refused (cuFile error 5011, CUDA error 2)");
  Batch batch;
  batch.add(*device, OpKind::kRead, 0, memory_.get(), kBytes);
  batch.wait(kTimeout);
}

// cuFile registers a region once, and takes addresses inside it by its base alone.
TEST_F(GdsTest, RegionsBelongToAllDrives) {
  const auto devices = open_drives(2);
  const std::span region(memory_.get(), kBytes);
  for (const auto& device : devices) EXPECT_TRUE(device->register_buffer(region));
  const auto reads_inside = [&](BlockDevice& device) {
    Batch batch;
    batch.add(device, OpKind::kRead, 0, memory_.get() + 8192, 4096);
    batch.wait(kTimeout);
  };
  devices[0]->unregister_buffer(region);
  reads_inside(*devices[0]);
  reads_inside(*devices[1]);
  // Negative control: the second drive still holds it, and so the library knows it.
  auto* buf_register =
      symbol_of<cufile::Status(const void*, std::size_t, int)>(library_, "cuFileBufRegister");
  EXPECT_EQ(buf_register(region.data(), kBytes, 0).error, cufile::kMemoryAlreadyRegistered);
  devices[1]->unregister_buffer(region);
  reads_inside(*devices[0]);
  EXPECT_EQ(buf_register(region.data(), kBytes, 0).error, cufile::kSuccess);
  // Registered behind the engine's back, the same address is refused.
  EXPECT_THROW(reads_inside(*devices[0]), Error);
  symbol_of<cufile::Status(const void*)>(library_, "cuFileBufDeregister")(region.data());
}

TEST_F(GdsTest, MemoryIsMovedInTheContextItWasRegisteredIn) {
  void* cuda = load_stand_in(SWARM_KV_CUDA_STAND_IN);
  auto* set_current = symbol_of<int(void*)>(cuda, "cuCtxSetCurrent");
  auto& context = *symbol_of<std::atomic<void*>>(library_, "stand_in_context");
  const auto device = open_drives()[0];
  int gpu = 0;
  set_current(&gpu);
  ASSERT_TRUE(device->register_buffer({memory_.get(), kBytes}));
  set_current(nullptr);
  const auto read_into = [&](std::byte* memory) {
    Batch batch;
    batch.add(*device, OpKind::kRead, 0, memory, 4096);
    batch.wait(kTimeout);
  };
  const auto other = allocate_aligned(4096, 4096);
  read_into(other.get());
  EXPECT_EQ(context, nullptr);  // negative control: no thread has one by itself
  read_into(memory_.get());
  EXPECT_EQ(context, &gpu);
  device->unregister_buffer({memory_.get(), kBytes});
}

}  // namespace
}  // namespace swarm_kv::io
