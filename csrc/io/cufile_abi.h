#pragma once

#include <sys/types.h>

#include <cstddef>

// What engine "gds" calls of NVIDIA's cuFile, https://docs.nvidia.com/gpudirect-storage/. Declared
// here because the library is loaded at run time and its header need not be there; where it is,
// io_gds_test.cpp compares.
namespace swarm_kv::io::cufile {

// CUfileError_t
struct Status {
  int error;       // CUfileOpError; 0: success
  int cuda_error;  // CUresult, where `error` is kCudaDriverError
};

// CUfileOpError, as far as it is told apart here. Reads and writes return it negated.
enum Error : int {
  kSuccess = 0,
  kDriverNotInitialized = 5001,
  kPlatformNotSupported = 5007,
  kIoNotSupported = 5008,
  kDeviceNotSupported = 5009,
  kCudaDriverError = 5011,
  kCudaPointerInvalid = 5012,
  kCudaMemoryTypeInvalid = 5013,
  kInvalidFileOpenFlag = 5019,
  kInvalidValue = 5022,
  kMemoryAlreadyRegistered = 5023,
  kMemoryNotRegistered = 5024,
  kPermissionDenied = 5025,
  kDriverAlreadyOpen = 5026,
  kDeviceNotFound = 5029,
  kNvfsSetupError = 5033,
  kIoDisabled = 5034,
};

// CUfileDescr_t
struct Description {
  int type;
  union {
    int fd;
    void* handle;
  } of;
  const void* file_system;
};
constexpr int kOpaqueFd = 1;  // CU_FILE_HANDLE_TYPE_OPAQUE_FD

using Handle = void*;  // CUfileHandle_t

using DriverOpen = Status (*)();
using HandleRegister = Status (*)(Handle* handle, Description* description);
using HandleDeregister = void (*)(Handle handle);
using BufRegister = Status (*)(const void* base, std::size_t bytes, int flags);
using BufDeregister = Status (*)(const void* base);
// Bytes moved; -1: see errno; else a negated Error. `base` is what was registered, or any address.
using Read = ssize_t (*)(Handle handle, void* base, std::size_t bytes, off_t file_offset,
                         off_t base_offset);
using Write = ssize_t (*)(Handle handle, const void* base, std::size_t bytes, off_t file_offset,
                          off_t base_offset);

}  // namespace swarm_kv::io::cufile
