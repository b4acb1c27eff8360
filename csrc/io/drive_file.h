#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/block_device.h"
#include "io/open_device.h"

namespace swarm_kv::io {

// The open file behind a drive, for engines that read and write through a file descriptor: an
// unlinked file in a directory, or an existing file or block device ("raw:").
class DriveFile {
 public:
  // Opens options.path and finds out by real transfers whether, and with which block, direct I/O
  // works. Throws kStorage when the path cannot be used.
  explicit DriveFile(const DeviceOptions& options);
  ~DriveFile();
  DriveFile(const DriveFile&) = delete;
  DriveFile& operator=(const DriveFile&) = delete;

  int fd() const { return fd_; }
  bool ephemeral() const { return ephemeral_; }  // an unlinked file of our own
  const Geometry& geometry() const { return geometry_; }
  uint64_t capacity() const { return capacity_; }  // bytes usable when opened
  const std::vector<std::string>& notes() const { return notes_; }

  // Returns the bytes now usable, at least `bytes`; `reserved` are usable already. Throws kStorage
  // without space. Appends to `note` what could not be had.
  uint64_t reserve(uint64_t bytes, uint64_t reserved, std::string* note);
  void flush();

 private:
  void open_ephemeral(const DeviceOptions& options);
  void open_raw(const DeviceOptions& options);
  void choose_geometry(const DeviceOptions& options);
  void leave_direct(int error);
  [[noreturn]] void fail(const std::string& what, int error) const;

  std::string path_;  // without "raw:"
  int fd_ = -1;
  bool ephemeral_ = false;
  bool block_device_ = false;
  bool direct_ = false;
  Geometry geometry_;
  uint64_t capacity_ = 0;
  std::vector<std::string> notes_;
};

}  // namespace swarm_kv::io
