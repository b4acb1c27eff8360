#include "io/thread_device.h"

#include <unistd.h>

#include <cerrno>
#include <utility>

namespace swarm_kv::io {
namespace {

int64_t move(int fd, const Transfer& transfer) {
  const auto offset = static_cast<off_t>(transfer.rest_offset());
  const ssize_t moved = transfer.kind == OpKind::kRead
                            ? pread(fd, transfer.rest_data(), transfer.rest_length(), offset)
                            : pwrite(fd, transfer.rest_data(), transfer.rest_length(), offset);
  return moved < 0 ? -errno : moved;
}

}  // namespace

ThreadDevice::ThreadDevice(const DeviceOptions& options, std::shared_ptr<DriveFile> file,
                           ThreadQueue::Move move)
    : BlockDevice({.name = options.label,
                   .geometry = file->geometry(),
                   .timeout = options.timeout,
                   .capacity_limit = options.capacity_limit,
                   .capacity = file->capacity(),
                   .notes = file->notes()}),
      file_(std::move(file)),
      queue_(std::move(move), options.threads) {}

ThreadDevice::~ThreadDevice() {
  if (!in_owner_process()) queue_.abandon();
}

uint64_t ThreadDevice::reserve_impl(uint64_t bytes) {
  std::string degradation;
  const uint64_t reserved = file_->reserve(bytes, capacity(), &degradation);
  if (!degradation.empty()) note(degradation);
  return reserved;
}

EngineResult open_threads(const DeviceOptions& options, EngineContext&) {
  auto file = std::make_shared<DriveFile>(options);
  return std::make_shared<ThreadDevice>(
      options, file, [fd = file->fd()](const Transfer& transfer) { return move(fd, transfer); });
}

}  // namespace swarm_kv::io
