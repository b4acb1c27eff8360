#pragma once

#include <cstdint>
#include <shared_mutex>
#include <span>
#include <string>
#include <vector>

#include "io/cufile_abi.h"
#include "io/transfer.h"

namespace swarm_kv::io {

// The cuFile library of this process, and the memory registered with it. Functions may be called by
// several threads at once.
class CuFile {
 public:
  // Loads the library and opens its driver, neither of which is undone: others in this process may
  // use them without having counted. Throws kStorage with the reason where they are not to be had.
  CuFile();
  CuFile(const CuFile&) = delete;
  CuFile& operator=(const CuFile&) = delete;

  // Throws kStorage with the reason where cuFile does not take the file.
  cufile::Handle register_file(int fd);
  void deregister_file(cufile::Handle handle);

  // Empty when registered, else the reason. Registering a region again counts its users. Device
  // memory is moved in the CUDA context that is current when it is registered.
  std::string register_region(std::span<std::byte> region);
  void unregister_region(std::span<std::byte> region);

  // Moves what is left of a transfer. Returns the bytes moved, or -errno: EIO for an error of
  // cuFile's own, which is put into `error`.
  int64_t move(cufile::Handle handle, const Transfer& transfer, std::string* error);

 private:
  struct Region {
    std::byte* begin;
    std::size_t bytes;
    uint32_t users;
    void* context;
  };
  // How cuFile wants to be told of an address.
  struct Place {
    std::byte* base;
    off_t offset;
    void* context;  // null: none
  };
  Place locate(std::byte* data, std::size_t bytes);
  bool in_owner_process() const;

  const int owner_pid_;
  cufile::HandleRegister handle_register_ = nullptr;
  cufile::HandleDeregister handle_deregister_ = nullptr;
  cufile::BufRegister buf_register_ = nullptr;
  cufile::BufDeregister buf_deregister_ = nullptr;
  cufile::Read read_ = nullptr;
  cufile::Write write_ = nullptr;
  // Of the CUDA driver; null where this process has none.
  int (*context_get_)(void** context) = nullptr;
  int (*context_set_)(void* context) = nullptr;

  std::shared_mutex mutex_;  // shared: transfers, exclusive: changes
  std::vector<Region> regions_;
};

}  // namespace swarm_kv::io
