// Stands in for NVIDIA's libcufile.so.0: what engine "gds" calls, by pread and pwrite, and as
// strict about registered memory as the documentation is. SWARM_KV_STAND_IN_FAULT names what goes
// wrong.
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string_view>
#include <thread>

#include "io/cufile_abi.h"

namespace {

using namespace swarm_kv::io::cufile;

std::mutex mutex;
std::map<const std::byte*, std::size_t> registered;

bool fault(std::string_view name) {
  const char* asked = std::getenv("SWARM_KV_STAND_IN_FAULT");
  return asked != nullptr && asked == name;
}

// 0, or the Error for an address that is not told as it was registered.
int refusal(const std::byte* base, off_t offset, std::size_t bytes) {
  const std::lock_guard lock(mutex);
  if (registered.contains(base)) {
    const bool inside = static_cast<std::size_t>(offset) + bytes <= registered[base];
    return inside ? 0 : kInvalidValue;
  }
  if (offset != 0) return kMemoryNotRegistered;
  const bool within = std::ranges::any_of(registered, [&](const auto& region) {
    return base > region.first && base < region.first + region.second;
  });
  return within ? kInvalidValue : 0;
}

template <typename Move>
ssize_t transfer(const std::byte* base, std::size_t bytes, off_t offset, Move move) {
  if (const int error = refusal(base, offset, bytes); error != 0) return -error;
  if (fault("slow")) std::this_thread::sleep_for(std::chrono::milliseconds(300));
  if (fault("cufile_error")) return -kCudaDriverError;
  if (fault("errno")) {
    errno = ENODEV;
    return -1;
  }
  if (fault("short")) bytes = std::min<std::size_t>(bytes, 4096);
  return move(bytes);
}

}  // namespace

extern "C" {

// For tests: how often data was read, and the CUDA context of the last time.
std::atomic<uint64_t> stand_in_reads{0};
std::atomic<void*> stand_in_context{nullptr};

Status cuFileDriverOpen() { return {fault("driver") ? kNvfsSetupError : kSuccess, 0}; }

Status cuFileHandleRegister(Handle* handle, Description* description) {
  if (fault("handle")) return {kIoNotSupported, 0};
  if (description->type != kOpaqueFd) return {kInvalidValue, 0};
  *handle = new int(description->of.fd);
  return {kSuccess, 0};
}

void cuFileHandleDeregister(Handle handle) { delete static_cast<int*>(handle); }

Status cuFileBufRegister(const void* base, std::size_t bytes, int) {
  if (fault("buffer")) return {kCudaDriverError, 2};
  const std::lock_guard lock(mutex);
  const bool fresh = registered.emplace(static_cast<const std::byte*>(base), bytes).second;
  return {fresh ? kSuccess : kMemoryAlreadyRegistered, 0};
}

Status cuFileBufDeregister(const void* base) {
  const std::lock_guard lock(mutex);
  const bool known = registered.erase(static_cast<const std::byte*>(base)) == 1;
  return {known ? kSuccess : kInvalidValue, 0};
}

ssize_t cuFileRead(Handle handle, void* base, std::size_t bytes, off_t file_offset, off_t offset) {
  ++stand_in_reads;
  if (void* cuda = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD); cuda != nullptr) {
    void* context = nullptr;
    reinterpret_cast<int (*)(void**)>(dlsym(cuda, "cuCtxGetCurrent"))(&context);
    stand_in_context = context;
  }
  auto* data = static_cast<std::byte*>(base);
  return transfer(data, bytes, offset, [&](std::size_t allowed) {
    const ssize_t moved = pread(*static_cast<int*>(handle), data + offset, allowed, file_offset);
    if (moved > 0 && fault("corrupt")) data[offset] ^= std::byte{1};
    return moved;
  });
}

ssize_t cuFileWrite(Handle handle, const void* base, std::size_t bytes, off_t file_offset,
                    off_t offset) {
  const auto* data = static_cast<const std::byte*>(base);
  return transfer(data, bytes, offset, [&](std::size_t allowed) {
    return pwrite(*static_cast<int*>(handle), data + offset, allowed, file_offset);
  });
}

}  // extern "C"
