// Opening drives: paths that cannot be used, engines that are refused, files that must stay as they
// were.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "io/aligned_buffer.h"
#include "io/error.h"
#include "io/open_device.h"
#include "io/uring_queue.h"
#include "tests/stand_ins.h"

namespace swarm_kv::io {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

class OpenTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() == "io_uring" && UringQueue::probe() != 0) {
      GTEST_SKIP() << "io_uring is refused here: " << std::strerror(UringQueue::probe());
    }
    if (GetParam() == "gds") load_stand_in(SWARM_KV_CUFILE_STAND_IN);
    std::string name = fs::temp_directory_path() / "swarm_kv_open_XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    directory_ = name;
  }
  void TearDown() override {
    if (!directory_.empty()) fs::remove_all(directory_);
  }

  DeviceOptions options(const std::string& path) const {
    DeviceOptions result;
    result.path = path;
    result.engine = GetParam();
    result.queue_depth = 16;
    return result;
  }
  std::shared_ptr<BlockDevice> open(const std::string& path) const {
    return open_devices({options(path)})[0];
  }
  std::string refusal(const DeviceOptions& options, ErrorKind kind = ErrorKind::kStorage) const {
    try {
      open_devices({options});
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), kind) << error.what();
      return error.what();
    }
    ADD_FAILURE() << options.path << " was opened";
    return {};
  }
  std::string refusal(const std::string& path) const { return refusal(options(path)); }

  // A file of `bytes` bytes of 'x'.
  std::string make_file(std::size_t bytes) const {
    const std::string path = directory_ + "/drive";
    std::ofstream(path) << std::string(bytes, 'x');
    return path;
  }

  std::string directory_;
};

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST_P(OpenTest, UnusablePathsAreExplained) {
  expect_contains(refusal(directory_ + "/none"), "/none' does not exist");
  expect_contains(refusal(make_file(10)), "is not a directory");
  expect_contains(refusal(make_file(10)), "raw:");
  expect_contains(refusal("raw:" + directory_ + "/none"), "never created");
  expect_contains(refusal("raw:" + directory_), "is a directory");
  expect_contains(refusal("raw:/dev/null"), "neither a regular file nor a block device");
  EXPECT_FALSE(fs::exists(directory_ + "/none"));
}

TEST_P(OpenTest, PathsWithoutPermissionAreExplained) {
  // Root may write everywhere, so another user tries.
  const std::string file = make_file(4096);
  chmod(file.c_str(), 0444);
  chmod(directory_.c_str(), 0555);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (getuid() == 0 && (setgid(65534) != 0 || setuid(65534) != 0)) _exit(3);
    int wrong = 0;
    for (const std::string& path : {directory_, "raw:" + file}) {
      try {
        open(path);
        ++wrong;
      } catch (const Error& error) {
        wrong += std::string(error.what()).find("is not writable") == std::string::npos;
      }
    }
    _exit(wrong);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  chmod(directory_.c_str(), 0755);
}

TEST_P(OpenTest, BadOptionsAreNamed) {
  const auto with = [&](auto change) {
    DeviceOptions changed = options(directory_);
    change(changed);
    return refusal(changed, ErrorKind::kArgument);
  };
  expect_contains(with([](auto& o) { o.engine = "floppy"; }), "\"floppy\" is unknown");
  expect_contains(with([](auto& o) { o.engine = "floppy"; }), "auto, io_uring, threads, gds");
  expect_contains(with([](auto& o) { o.queue_depth = 0; }), "queue_depth = 0");
  expect_contains(with([](auto& o) { o.queue_depth = 5000; }), "between 1 and 4096");
  expect_contains(with([](auto& o) { o.threads = 0; }), "threads = 0");
  expect_contains(with([](auto& o) { o.timeout = 0ms; }), "timeout = 0 ms");
  expect_contains(with([](auto& o) { o.block = 768; }), "block = 768");
  expect_contains(with([](auto& o) { o.read_only = true; }), "read_only");
}

TEST_P(OpenTest, LargerBlocksMayBeAskedFor) {
  DeviceOptions large = options(directory_);
  large.block = 16384;
  const auto device = open_devices({large})[0];
  EXPECT_EQ(device->geometry().block, 16384U);
  device->reserve(1);
  EXPECT_EQ(device->capacity(), 16384U);
}

TEST_P(OpenTest, RawFilesAreUsedInPlace) {
  const std::string path = make_file(64U << 10);
  {
    const auto device = open("raw:" + path);
    EXPECT_EQ(device->capacity(), 64U << 10);
    std::vector<std::byte> all(64U << 10);
    device->read(0, all);
    EXPECT_TRUE(
        std::all_of(all.begin(), all.end(), [](std::byte each) { return each == std::byte{'x'}; }));
    const std::byte mark[] = {std::byte{'a'}, std::byte{'b'}};
    device->write(1000, mark);
    device->flush();
  }
  // Same length, two bytes changed, nothing beside it.
  std::string expected(64U << 10, 'x');
  expected.replace(1000, 2, "ab");
  std::ifstream stream(path);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(stream), {}), expected);
  EXPECT_EQ(std::distance(fs::directory_iterator(directory_), fs::directory_iterator()), 1);
  {
    const auto device = open("raw:" + path);
    device->reserve(1U << 20);
    std::vector<std::byte> two(2);
    device->read(1000, two);
    EXPECT_EQ(two[0], std::byte{'a'});
    device->write((1U << 20) - 2, two);
  }
  EXPECT_EQ(fs::file_size(path), 1U << 20);
}

TEST_P(OpenTest, EmptyRawFileGrowsByReserve) {
  const std::string path = make_file(0);
  const auto device = open("raw:" + path);
  EXPECT_EQ(device->capacity(), 0U);
  EXPECT_EQ(fs::file_size(path), 0U);
  device->reserve(8192);
  const std::vector<std::byte> data(8192, std::byte{3});
  device->write(0, data);
  std::vector<std::byte> back(8192);
  device->read(0, back);
  EXPECT_EQ(back, data);
}

TEST_P(OpenTest, OddTailOfARawFileIsNotUsed) {
  const auto device = open("raw:" + make_file(8192 + 100));
  EXPECT_EQ(device->capacity(), 8192U);
  ASSERT_FALSE(device->notes().empty());
  expect_contains(device->notes().back(), "offset 8192");
}

TEST_P(OpenTest, FileThatLostItsTailIsAnErrorNotZeros) {
  const std::string path = make_file(64U << 10);
  const auto device = open("raw:" + path);
  ASSERT_EQ(truncate(path.c_str(), 4096), 0);
  std::vector<std::byte> out(16U << 10);
  EXPECT_THROW(device->read(0, out), Error);
  EXPECT_GE(device->counters().short_transfers, 2U);
  out.resize(4096);
  device->read(0, out);
}

TEST_P(OpenTest, ReadOnlyRawFile) {
  DeviceOptions read_only = options("raw:" + make_file(8192));
  read_only.read_only = true;
  const auto device = open_devices({read_only})[0];
  std::vector<std::byte> data(4096);
  device->read(0, data);
  EXPECT_EQ(data[5], std::byte{'x'});
  EXPECT_THROW(device->write(0, data), Error);
}

TEST_P(OpenTest, FileSystemWithoutSpace) {
  const std::string mount_point = directory_ + "/small";
  fs::create_directory(mount_point);
  if (mount("tmpfs", mount_point.c_str(), "tmpfs", 0, "size=4m") != 0) {
    GTEST_SKIP() << "cannot mount a small tmpfs: " << std::strerror(errno);
  }
  {
    const auto device = open(mount_point);
    device->reserve(1U << 20);
    try {
      device->reserve(64U << 20);
      ADD_FAILURE() << "64 MiB fit into 4";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kStorage);
      expect_contains(error.what(), mount_point + "' is full");
      expect_contains(error.what(), "for 67108864 in all");
      expect_contains(error.what(), "3145728 are free");
    }
    EXPECT_EQ(device->capacity(), 1U << 20);
    const std::vector<std::byte> data(1U << 20, std::byte{1});
    device->write(0, data);
    device->reserve(2U << 20);
    // Full to the last byte: not even the test block of another drive fits.
    device->reserve(4U << 20);
    expect_contains(refusal(mount_point), "is full");
  }
  open(mount_point);  // the space is free again: nothing was left behind
  EXPECT_EQ(umount(mount_point.c_str()), 0) << std::strerror(errno);
}

TEST_P(OpenTest, KilledProcessLeavesNothing) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // Nothing may escape: the child must not go on with the parent's tests.
    try {
      const auto device = open(directory_);
      device->reserve(1U << 20);
      const std::vector<std::byte> data(4096);
      device->write(0, data);
      if (write(ready[1], "r", 1) != 1) _exit(1);
      pause();
    } catch (...) {
      _exit(1);
    }
  }
  close(ready[1]);
  char got = 0;
  ASSERT_EQ(read(ready[0], &got, 1), 1);
  close(ready[0]);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(fs::is_empty(directory_));
}

TEST_P(OpenTest, ClosedDriveGivesItsSpaceBack) {
  // Registered files and rings must not hold an unlinked file open.
  const auto open_files = [] {
    return std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator());
  };
  const auto before = open_files();
  {
    auto devices = open_devices({options(directory_), options(directory_)});
    for (const auto& device : devices) device->reserve(4096);
    devices.erase(devices.begin());
    const std::vector<std::byte> data(512);
    devices[0]->write(0, data);
  }
  EXPECT_EQ(open_files(), before);
}

INSTANTIATE_TEST_SUITE_P(FileEngines, OpenTest, testing::Values("io_uring", "threads", "gds"),
                         [](const auto& info) { return info.param; });

TEST(Auto, PicksAnEngineAndSaysWhy) {
  DeviceOptions options;
  options.path = fs::temp_directory_path();
  const auto device = open_devices({options})[0];
  if (UringQueue::probe() == 0) {
    EXPECT_EQ(device->engine(), "io_uring");
  } else {
    EXPECT_EQ(device->engine(), "threads");
    ASSERT_FALSE(device->notes().empty());
    expect_contains(device->notes().back(), "seccomp");
  }
}

TEST(Engines, AreListedAndMixed) {
  const auto names = engine_names();
  EXPECT_NE(std::find(names.begin(), names.end(), "simulated"), names.end());
  std::vector<DeviceOptions> options(names.size());
  const auto memory = allocate_aligned(names.size() * 4096, 4096);
  for (std::size_t i = 0; i < names.size(); ++i) {
    options[i].path = fs::temp_directory_path();
    options[i].engine = names[i];
    if (names[i] == "io_uring" && UringQueue::probe() != 0) options[i].engine = "memory";
  }
  const auto devices = open_devices(options);
  Batch batch;
  for (std::size_t i = 0; i < devices.size(); ++i) {
    devices[i]->reserve(8192);
    const std::vector<std::byte> data(8192, static_cast<std::byte>(i + 1));
    devices[i]->write(0, data);
    batch.add(*devices[i], OpKind::kRead, 4096, memory.get() + i * 4096, 4096);
  }
  batch.submit();
  batch.wait(20s);
  for (std::size_t i = 0; i < devices.size(); ++i) {
    EXPECT_EQ(memory.get()[i * 4096 + 4095], static_cast<std::byte>(i + 1));
  }
}

TEST(Engines, NoDrivesIsNoError) { EXPECT_TRUE(open_devices({}).empty()); }

TEST(RegisteredBuffers, MemlockLimitIsExplained) {
  if (UringQueue::probe() != 0) GTEST_SKIP() << "io_uring is refused here";
  const std::string directory = fs::temp_directory_path();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // A user without privileges, who may lock 64 KiB.
    const rlimit limit{64U << 10, 64U << 10};
    if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0) _exit(3);
    if (getuid() == 0 && (setgid(65534) != 0 || setuid(65534) != 0)) _exit(3);
    try {
      DeviceOptions options;
      options.path = directory;
      options.engine = "io_uring";
      const auto device = open_devices({options})[0];
      device->reserve(1U << 20);
      const std::size_t bytes = 1U << 20;
      const auto memory = allocate_aligned(bytes, 4096);
      std::memset(memory.get(), 9, bytes);
      if (device->register_buffer({memory.get(), bytes})) _exit(4);
      const auto notes = device->notes();
      if (notes.empty() || notes.back().find("memlock limit is 64 KiB") == std::string::npos) {
        _exit(5);
      }
      device->write(0, {memory.get(), bytes});
      device->read(0, {memory.get(), bytes});
      _exit(0);
    } catch (...) {
      _exit(6);
    }
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace swarm_kv::io
