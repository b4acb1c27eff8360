#pragma once

#include <memory>
#include <string>

#include "io/cufile.h"
#include "io/drive_file.h"
#include "io/engine.h"
#include "io/thread_device.h"

namespace swarm_kv::io {

// A drive's file, registered with cuFile.
class GdsFile {
 public:
  // Throws kStorage with the reason where cuFile does not take the file.
  GdsFile(std::shared_ptr<DriveFile> file, std::shared_ptr<CuFile> cufile);
  ~GdsFile();
  GdsFile(const GdsFile&) = delete;
  GdsFile& operator=(const GdsFile&) = delete;

  const std::shared_ptr<DriveFile>& file() const { return file_; }
  CuFile& cufile() const { return *cufile_; }
  int64_t move(const Transfer& transfer, std::string* error) const;

 private:
  const std::shared_ptr<DriveFile> file_;
  const std::shared_ptr<CuFile> cufile_;
  const cufile::Handle handle_;
};

// A file or block device read and written through cuFile: GPUDirect Storage, which moves data
// between drive and GPU without the host's memory. Buffers are host memory, or device memory that
// was given to register_buffer(); device memory is for Batch only, since the blocking read() and
// write() copy.
//
// By cuFileRead and cuFileWrite in a few threads. NVIDIA's guide recommends these for applications
// with threads for their I/O and requests of 64 KiB and more, for their low latency of submission;
// their price is CPU time for requests below that, which batches (cuFileBatchIOSubmit) save. But a
// batch has one handle of fixed size that somebody has to poll, while our transfers complete, come
// short and are cancelled one by one, for several threads at once. What cuFileReadAsync puts on a
// CUDA stream completes in that stream's order, and drives do not.
class GdsDevice : public ThreadDevice {
 public:
  GdsDevice(const DeviceOptions& options, std::shared_ptr<GdsFile> file);

  std::string_view engine() const override { return "gds"; }

 protected:
  bool register_buffer_impl(std::span<std::byte> region) override;
  void unregister_buffer_impl(std::span<std::byte> region) override;

 private:
  const std::shared_ptr<GdsFile> file_;
};

// Why a drive cannot be used through cuFile, found out by moving a block; empty when it can. Throws
// what opening the drive with any engine would.
std::string gds_obstacle(const DeviceOptions& options);

EngineResult open_gds(const DeviceOptions& options, EngineContext& context);

}  // namespace swarm_kv::io
