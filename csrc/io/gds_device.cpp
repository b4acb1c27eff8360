#include "io/gds_device.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "io/aligned_buffer.h"
#include "io/error.h"

namespace swarm_kv::io {
namespace {

[[noreturn]] void fail(const std::string& reason) { throw Error(ErrorKind::kStorage, reason); }

// Moves the file's first block. Throws kStorage where it does not move in full.
void move_block(const GdsFile& file, OpKind kind, std::byte* memory) {
  Transfer transfer;
  transfer.kind = kind;
  transfer.data = memory;
  transfer.length = file.file()->geometry().block;
  std::string error;
  const int64_t moved = file.move(transfer, &error);
  if (!error.empty()) fail(error);
  if (moved == transfer.length) return;
  const std::string what = kind == OpKind::kRead ? "cuFileRead" : "cuFileWrite";
  if (moved < 0) {
    fail(what + " failed: " + std::generic_category().message(static_cast<int>(-moved)) +
         " (errno " + std::to_string(-moved) + ")");
  }
  fail(what + " moved " + std::to_string(moved) + " bytes of " + std::to_string(transfer.length));
}

// Reads a block through cuFile, and writes it before where nothing is overwritten by that. Throws
// kStorage with what goes wrong.
void try_block(const GdsFile& file) {
  const DriveFile& plain = *file.file();
  const uint32_t block = plain.geometry().block;
  if (!plain.ephemeral() && plain.capacity() < block) return;
  const auto memory = allocate_aligned(3UL * block, std::max(block, 4096U));
  std::byte* written = memory.get();
  std::byte* expected = written + block;
  std::byte* read = expected + block;
  std::memset(written, 0x5a, block);
  std::memset(read, 0, block);
  if (plain.ephemeral()) move_block(file, OpKind::kWrite, written);
  if (pread(plain.fd(), expected, block, 0) != static_cast<ssize_t>(block)) {
    fail("a test block cannot be read without cuFile");
  }
  if (plain.ephemeral() && std::memcmp(expected, written, block) != 0) {
    fail("cuFileWrite wrote other bytes than it was given");
  }
  move_block(file, OpKind::kRead, read);
  if (std::memcmp(read, expected, block) != 0)
    fail("cuFileRead gave other bytes than the file has");
}

}  // namespace

GdsFile::GdsFile(std::shared_ptr<DriveFile> file, std::shared_ptr<CuFile> cufile)
    : file_(std::move(file)),
      cufile_(std::move(cufile)),
      handle_(cufile_->register_file(file_->fd())) {}

GdsFile::~GdsFile() { cufile_->deregister_file(handle_); }

int64_t GdsFile::move(const Transfer& transfer, std::string* error) const {
  return cufile_->move(handle_, transfer, error);
}

GdsDevice::GdsDevice(const DeviceOptions& options, std::shared_ptr<GdsFile> file)
    : ThreadDevice(options, file->file(),
                   [file](const Transfer& transfer) {
                     std::string error;
                     const int64_t moved = file->move(transfer, &error);
                     if (!error.empty()) transfer.device->note(error);
                     return moved;
                   }),
      file_(std::move(file)) {}

bool GdsDevice::register_buffer_impl(std::span<std::byte> region) {
  const std::string reason = file_->cufile().register_region(region);
  if (reason.empty()) return true;
  note(reason);
  return false;
}

void GdsDevice::unregister_buffer_impl(std::span<std::byte> region) {
  file_->cufile().unregister_region(region);
}

std::string gds_obstacle(const DeviceOptions& options) {
  std::shared_ptr<CuFile> cufile;
  try {
    cufile = std::make_shared<CuFile>();
  } catch (const Error& error) {
    return error.what();
  }
  const auto file = std::make_shared<DriveFile>(options);
  try {
    try_block(GdsFile(file, cufile));
  } catch (const Error& error) {
    return "'" + options.path + "': " + error.what();
  }
  return {};
}

EngineResult open_gds(const DeviceOptions& options, EngineContext& context) {
  // One for all drives: a region is registered with the library once.
  if (context.shared == nullptr) context.shared = std::make_shared<CuFile>();
  return std::make_shared<GdsDevice>(
      options, std::make_shared<GdsFile>(std::make_shared<DriveFile>(options),
                                         std::static_pointer_cast<CuFile>(context.shared)));
}

}  // namespace swarm_kv::io
