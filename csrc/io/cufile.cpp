#include "io/cufile.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>

#include "io/error.h"

namespace swarm_kv::io {
namespace {

constexpr const char* kLibrary = "libcufile.so.0";
constexpr const char* kCudaDriver = "libcuda.so.1";

[[noreturn]] void fail(const std::string& reason) { throw Error(ErrorKind::kStorage, reason); }

template <typename Function>
void find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr) fail(std::string(kLibrary) + " has no function " + name);
}

const char* meaning(int error) {
  switch (error) {
    case cufile::kDriverNotInitialized:
      return "the nvidia-fs driver is not loaded and compatibility mode is off";
    case cufile::kPlatformNotSupported:
      return "this platform is not supported";
    case cufile::kIoNotSupported:
      return "this file system is not supported";
    case cufile::kDeviceNotSupported:
      return "this GPU is not supported";
    case cufile::kCudaDriverError:
      return "the CUDA driver refused";
    case cufile::kCudaPointerInvalid:
    case cufile::kCudaMemoryTypeInvalid:
      return "this kind of memory is not supported; host memory needs CUDA 12.2";
    case cufile::kInvalidFileOpenFlag:
      return "it needs direct I/O, which is off or does not work on this drive";
    case cufile::kPermissionDenied:
      return "permission denied";
    case cufile::kDeviceNotFound:
      return "no GPU was found";
    case cufile::kNvfsSetupError:
      return "its set-up failed, as it does without a GPU and its driver";
    case cufile::kIoDisabled:
      return "it is disabled by cufile.json";
    default:
      return "it failed";
  }
}

std::string text(cufile::Status status) {
  std::string text = meaning(status.error);
  text += " (cuFile error " + std::to_string(status.error);
  if (status.error == cufile::kCudaDriverError) {
    text += ", CUDA error " + std::to_string(status.cuda_error);
  }
  return text + ")";
}

}  // namespace

CuFile::CuFile() : owner_pid_(getpid()) {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    fail("cuFile was not found (" + std::string(dlerror()) +
         "); it comes with CUDA and with CUDA builds of torch");
  }
  cufile::DriverOpen driver_open = nullptr;
  find(library, "cuFileDriverOpen", &driver_open);
  find(library, "cuFileHandleRegister", &handle_register_);
  find(library, "cuFileHandleDeregister", &handle_deregister_);
  find(library, "cuFileBufRegister", &buf_register_);
  find(library, "cuFileBufDeregister", &buf_deregister_);
  find(library, "cuFileRead", &read_);
  find(library, "cuFileWrite", &write_);
  const cufile::Status status = driver_open();
  if (status.error != cufile::kSuccess && status.error != cufile::kDriverAlreadyOpen) {
    fail("cuFile's driver does not open: " + text(status));
  }
  // Loaded by now where there is device memory.
  if (void* cuda = dlopen(kCudaDriver, RTLD_LAZY | RTLD_NOLOAD); cuda != nullptr) {
    context_get_ = reinterpret_cast<decltype(context_get_)>(dlsym(cuda, "cuCtxGetCurrent"));
    context_set_ = reinterpret_cast<decltype(context_set_)>(dlsym(cuda, "cuCtxSetCurrent"));
  }
}

// The library is not to be called in a forked child.
bool CuFile::in_owner_process() const { return getpid() == owner_pid_; }

cufile::Handle CuFile::register_file(int fd) {
  cufile::Description description{};
  description.type = cufile::kOpaqueFd;
  description.of.fd = fd;
  cufile::Handle handle = nullptr;
  const cufile::Status status = handle_register_(&handle, &description);
  if (status.error != cufile::kSuccess) fail("cuFile does not take its files: " + text(status));
  return handle;
}

void CuFile::deregister_file(cufile::Handle handle) {
  if (in_owner_process()) handle_deregister_(handle);
}

std::string CuFile::register_region(std::span<std::byte> region) {
  std::lock_guard lock(mutex_);
  for (Region& known : regions_) {
    if (known.begin == region.data() && known.bytes == region.size()) {
      ++known.users;
      return {};
    }
  }
  const cufile::Status status = buf_register_(region.data(), region.size(), 0);
  if (status.error != cufile::kSuccess) {
    return std::to_string(region.size()) +
           " bytes of buffers are not registered with cuFile: " + text(status) +
           "; transfers go through buffers of its own";
  }
  void* context = nullptr;
  if (context_get_ != nullptr && context_set_ != nullptr) context_get_(&context);
  regions_.push_back({region.data(), region.size(), 1, context});
  return {};
}

void CuFile::unregister_region(std::span<std::byte> region) {
  std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(regions_, [&](const Region& known) {
    return known.begin == region.data() && known.bytes == region.size();
  });
  if (found == regions_.end() || --found->users > 0) return;
  buf_deregister_(region.data());
  regions_.erase(found);
}

CuFile::Place CuFile::locate(std::byte* data, std::size_t bytes) {
  std::shared_lock lock(mutex_);
  for (const Region& region : regions_) {
    if (data >= region.begin && data + bytes <= region.begin + region.bytes) {
      return {region.begin, data - region.begin, region.context};
    }
  }
  return {data, 0, nullptr};
}

int64_t CuFile::move(cufile::Handle handle, const Transfer& transfer, std::string* error) {
  const Place place = locate(transfer.rest_data(), transfer.rest_length());
  // Memory of a GPU is reached in its context only, and the calling thread may have none.
  if (place.context != nullptr) context_set_(place.context);
  const auto offset = static_cast<off_t>(transfer.rest_offset());
  const bool reads = transfer.kind == OpKind::kRead;
  const ssize_t moved =
      reads ? read_(handle, place.base, transfer.rest_length(), offset, place.offset)
            : write_(handle, place.base, transfer.rest_length(), offset, place.offset);
  if (moved >= 0) return moved;
  if (moved == -1) return errno != 0 ? -errno : -EIO;
  *error = std::string(reads ? "cuFileRead" : "cuFileWrite") +
           " failed: " + text({static_cast<int>(-moved), 0});
  return -EIO;
}

}  // namespace swarm_kv::io
