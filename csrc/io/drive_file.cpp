#include "io/drive_file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "io/aligned_buffer.h"
#include "io/error.h"

namespace swarm_kv::io {
namespace {

constexpr std::string_view kRawPrefix = "raw:";
constexpr uint32_t kFallbackBlocks[] = {512, 4096};
constexpr std::size_t kPageAlignment = 4096;

std::string errno_text(int error) {
  return std::generic_category().message(error) + " (errno " + std::to_string(error) + ")";
}

bool is_power_of_two(uint64_t value) { return value != 0 && (value & (value - 1)) == 0; }

ssize_t retry_pread(int fd, void* data, std::size_t bytes, off_t offset) {
  ssize_t moved;
  do moved = pread(fd, data, bytes, offset);
  while (moved < 0 && errno == EINTR);
  return moved;
}

ssize_t retry_pwrite(int fd, const void* data, std::size_t bytes, off_t offset) {
  ssize_t moved;
  do moved = pwrite(fd, data, bytes, offset);
  while (moved < 0 && errno == EINTR);
  return moved;
}

int take_error(ssize_t moved) { return moved < 0 ? errno : EIO; }

// Writes and reads back one block at offset 0 of an empty file. 0, or the errno that refused it.
int probe_block(int fd, uint32_t block) {
  const auto memory = allocate_aligned(2UL * block, std::max<std::size_t>(block, kPageAlignment));
  std::byte* written = memory.get();
  std::byte* read_back = memory.get() + block;
  std::memset(written, 0x5a, block);
  std::memset(read_back, 0, block);
  ssize_t moved = retry_pwrite(fd, written, block, 0);
  if (moved != static_cast<ssize_t>(block)) return take_error(moved);
  moved = retry_pread(fd, read_back, block, 0);
  if (moved != static_cast<ssize_t>(block)) return take_error(moved);
  return std::memcmp(written, read_back, block) == 0 ? 0 : EIO;
}

// Reads one block of a file whose data must not be touched.
int probe_read(int fd, uint32_t block) {
  const auto memory = allocate_aligned(block, std::max<std::size_t>(block, kPageAlignment));
  const ssize_t moved = retry_pread(fd, memory.get(), block, 0);
  return moved == static_cast<ssize_t>(block) ? 0 : take_error(moved);
}

// An unlinked file of mode 0600 in `directory`, or -1 with errno set.
int open_unlinked(const std::string& directory, int flags) {
  const int fd = open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
  if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT)) return fd;
  std::string name = directory + "/.swarm_kv-XXXXXX";
  const int named = mkostemp(name.data(), O_CLOEXEC);
  if (named < 0) return -1;
  unlink(name.c_str());
  if (flags != 0 && fcntl(named, F_SETFL, flags) != 0) {
    const int error = errno;
    close(named);
    errno = error;
    return -1;
  }
  return named;
}

}  // namespace

DriveFile::DriveFile(const DeviceOptions& options) {
  try {
    if (options.path.starts_with(kRawPrefix)) {
      path_ = options.path.substr(kRawPrefix.size());
      open_raw(options);
    } else {
      path_ = options.path;
      open_ephemeral(options);
    }
    choose_geometry(options);
  } catch (...) {
    if (fd_ >= 0) close(fd_);
    throw;
  }
}

DriveFile::~DriveFile() { close(fd_); }

void DriveFile::fail(const std::string& what, int error) const {
  throw Error(ErrorKind::kStorage, "'" + path_ + "' " + what + ": " + errno_text(error));
}

void DriveFile::open_ephemeral(const DeviceOptions& options) {
  ephemeral_ = true;
  struct stat info{};
  if (stat(path_.c_str(), &info) != 0) {
    if (errno == ENOENT) {
      throw Error(ErrorKind::kStorage,
                  "'" + path_ + "' does not exist; create the directory on the drive to use");
    }
    fail("cannot be examined", errno);
  }
  if (!S_ISDIR(info.st_mode)) {
    throw Error(ErrorKind::kStorage, "'" + path_ +
                                         "' is not a directory; give a directory, or raw:" + path_ +
                                         " to use the file or block device itself");
  }
  direct_ = options.direct;
  fd_ = open_unlinked(path_, direct_ ? O_DIRECT : 0);
  if (fd_ < 0 && direct_ && errno == EINVAL) {
    leave_direct(EINVAL);
    fd_ = open_unlinked(path_, 0);
  }
  if (fd_ < 0) {
    const int error = errno;
    if (error == EACCES || error == EPERM || error == EROFS) {
      fail("is not writable", error);
    }
    if (error == ENOSPC || error == EDQUOT) fail("is full", error);
    fail("cannot hold a file", error);
  }
}

void DriveFile::open_raw(const DeviceOptions& options) {
  const int access = (options.read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC;
  direct_ = options.direct;
  fd_ = open(path_.c_str(), access | (direct_ ? O_DIRECT : 0));
  if (fd_ < 0 && direct_ && errno == EINVAL) {
    leave_direct(EINVAL);
    fd_ = open(path_.c_str(), access);
  }
  if (fd_ < 0) {
    const int error = errno;
    if (error == ENOENT) {
      throw Error(ErrorKind::kStorage,
                  "'" + path_ + "' does not exist; raw: paths are never created");
    }
    if (error == EISDIR) {
      throw Error(ErrorKind::kStorage, "'" + path_ + "' is a directory; leave out the raw: prefix");
    }
    if (error == EACCES || error == EPERM || error == EROFS) {
      fail(options.read_only ? "is not readable" : "is not writable", error);
    }
    fail("cannot be opened", error);
  }
  struct stat info{};
  if (fstat(fd_, &info) != 0) fail("cannot be examined", errno);
  block_device_ = S_ISBLK(info.st_mode);
  if (!block_device_ && !S_ISREG(info.st_mode)) {
    throw Error(ErrorKind::kStorage,
                "'" + path_ + "' is neither a regular file nor a block device");
  }
  capacity_ = static_cast<uint64_t>(info.st_size);
  if (block_device_ && ioctl(fd_, BLKGETSIZE64, &capacity_) != 0) {
    fail("has no readable size", errno);
  }
}

void DriveFile::leave_direct(int error) {
  direct_ = false;
  notes_.push_back("'" + path_ + "': direct I/O does not work here (" + errno_text(error) +
                   "), transfers go through the page cache; use a local ext4 or xfs file system");
}

void DriveFile::choose_geometry(const DeviceOptions& options) {
  uint32_t block = kFallbackBlocks[0];
  uint32_t memory_alignment = 0;
  std::vector<uint32_t> candidates;
#ifdef STATX_DIOALIGN
  struct statx extended{};
  if (statx(fd_, "", AT_EMPTY_PATH, STATX_DIOALIGN, &extended) == 0 &&
      (extended.stx_mask & STATX_DIOALIGN) != 0 && is_power_of_two(extended.stx_dio_offset_align)) {
    candidates.push_back(extended.stx_dio_offset_align);
    memory_alignment = extended.stx_dio_mem_align;
  }
#endif
  int sector = 0;
  if (block_device_ && ioctl(fd_, BLKSSZGET, &sector) == 0 && is_power_of_two(sector)) {
    candidates.push_back(static_cast<uint32_t>(sector));
  }
  candidates.insert(candidates.end(), std::begin(kFallbackBlocks), std::end(kFallbackBlocks));

  if (direct_) {
    // Existing data is only read. Whether writes work as well, a file beside it can tell.
    int probe_fd = ephemeral_ ? fd_ : -1;
    if (!ephemeral_ && !block_device_) {
      const std::size_t slash = path_.rfind('/');
      const std::string directory = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
      probe_fd = open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | O_DIRECT, 0600);
    }
    int error = 0;
    for (const uint32_t candidate : candidates) {
      error = probe_fd >= 0 ? probe_block(probe_fd, candidate) : 0;
      if (error == 0 && !ephemeral_ && capacity_ >= candidate) error = probe_read(fd_, candidate);
      block = candidate;
      if (error == 0 || error == ENOSPC || error == EDQUOT) break;
    }
    if (probe_fd >= 0 && probe_fd != fd_) close(probe_fd);
    if (error == ENOSPC || error == EDQUOT) fail("is full", error);
    if (error == EINVAL || error == EOPNOTSUPP) {
      leave_direct(error);
      if (fcntl(fd_, F_SETFL, 0) != 0) fail("cannot leave direct I/O", errno);
      block = kFallbackBlocks[0];
    } else if (error != 0) {
      fail("failed a test transfer of " + std::to_string(block) + " bytes", error);
    }
  } else if (ephemeral_) {
    const int error = probe_block(fd_, block);
    if (error == ENOSPC || error == EDQUOT) fail("is full", error);
    if (error != 0) fail("failed a test transfer of " + std::to_string(block) + " bytes", error);
  }
  if (ephemeral_ && ftruncate(fd_, 0) != 0) fail("cannot be emptied after the test", errno);

  if (options.block != 0 && options.block < block) {
    throw Error(ErrorKind::kArgument, "'" + path_ + "': block = " + std::to_string(options.block) +
                                          " bytes is below the drive's logical block of " +
                                          std::to_string(block) +
                                          "; use 0 or a larger power of two");
  }
  geometry_.direct = direct_;
  geometry_.block = std::max(block, options.block);
  geometry_.memory_alignment =
      direct_ && is_power_of_two(memory_alignment) ? memory_alignment : block;
  if (capacity_ % geometry_.block != 0) {
    capacity_ -= capacity_ % geometry_.block;
    notes_.push_back("'" + path_ + "': the last bytes after offset " + std::to_string(capacity_) +
                     " do not fill a block and are not used");
  }
}

uint64_t DriveFile::reserve(uint64_t bytes, uint64_t reserved, std::string* note) {
  const auto no_space = [&](uint64_t free_bytes) {
    throw Error(ErrorKind::kStorage,
                "'" + path_ + "' is full: wanted " + std::to_string(bytes - reserved) +
                    " more bytes for " + std::to_string(bytes) + " in all, " +
                    std::to_string(free_bytes) + " are free; free space there or add a drive");
  };
  if (block_device_) no_space(0);
  struct statvfs space{};
  const bool known = fstatvfs(fd_, &space) == 0;
  const uint64_t free_bytes = known ? static_cast<uint64_t>(space.f_bavail) * space.f_frsize : 0;
  struct stat info{};
  if (fstat(fd_, &info) != 0) fail("cannot be examined", errno);
  const uint64_t held = std::max<uint64_t>(static_cast<uint64_t>(info.st_blocks) * 512, reserved);
  // Asked first, so that a request that cannot succeed leaves nothing behind.
  if (known && bytes > held && bytes - held > free_bytes) no_space(free_bytes);

  int result;
  do result = fallocate(fd_, 0, 0, static_cast<off_t>(bytes));
  while (result != 0 && errno == EINTR);
  if (result == 0) return bytes;
  const int error = errno;
  if (error == EOPNOTSUPP || error == ENOSYS) {
    if (ftruncate(fd_, static_cast<off_t>(bytes)) != 0) fail("cannot grow", errno);
    *note = "'" + path_ + "': the file system cannot preallocate (" + errno_text(error) +
            "), so a write can still run out of space";
    return bytes;
  }
  if (ephemeral_ && ftruncate(fd_, static_cast<off_t>(reserved)) != 0) {
    fail("cannot give back a partial reservation", errno);
  }
  if (error == ENOSPC || error == EDQUOT) no_space(free_bytes);
  fail("cannot grow to " + std::to_string(bytes) + " bytes", error);
}

void DriveFile::flush() {
  int result;
  do result = fdatasync(fd_);
  while (result != 0 && errno == EINTR);
  if (result != 0) fail("could not be flushed", errno);
}

}  // namespace swarm_kv::io
