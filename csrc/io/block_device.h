#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/batch.h"
#include "io/latency_histogram.h"

namespace swarm_kv::io {

struct DeviceModel;
struct Transfer;
class TransferQueue;

struct Geometry {
  uint32_t block = 512;  // bytes; offsets and lengths of batched transfers are multiples of it
  uint32_t memory_alignment = 512;   // bytes; addresses of batched transfers are multiples of it
  uint32_t max_transfer = 1U << 20;  // bytes; longer transfers are split
  bool direct = false;               // the page cache is bypassed
};

struct Counters {
  uint64_t reads = 0;  // completed requests, after splitting
  uint64_t writes = 0;
  uint64_t read_bytes = 0;
  uint64_t write_bytes = 0;
  uint64_t short_transfers = 0;  // completions shorter than asked; the rest was submitted again
  uint64_t errors = 0;           // requests that failed
  // Microseconds from submit() to completion; virtual time on simulated drives.
  double read_p50_us = 0;
  double read_p99_us = 0;
  double write_p50_us = 0;
  double write_p99_us = 0;
  double busy_seconds = 0;  // simulated drives: virtual seconds spent serving requests
};

// One drive. This class does alignment, splitting, resubmission of short transfers, time-outs,
// counters and latency percentiles; engines supply a TransferQueue and the *_impl functions.
// All functions may be called by several threads at once.
class BlockDevice : public std::enable_shared_from_this<BlockDevice> {
 public:
  virtual ~BlockDevice();
  BlockDevice(const BlockDevice&) = delete;
  BlockDevice& operator=(const BlockDevice&) = delete;

  // Blocking transfers of any alignment; the range lies below capacity(). A write that covers a
  // block only in part reads it first; such writes are serialised against each other.
  void read(uint64_t offset, std::span<std::byte> out);
  void write(uint64_t offset, std::span<const std::byte> data);
  void flush();  // returns when completed writes survive a power cut

  // Makes offsets below `bytes` (rounded up to a block) writable; never shrinks. Without space it
  // throws kStorage naming path, wanted and free bytes, and capacity() stays as it was.
  void reserve(uint64_t bytes);
  uint64_t capacity() const { return capacity_.load(std::memory_order_acquire); }

  // Fixed-buffer I/O for transfers inside `region`, of any alignment. False where the engine has
  // none, or where the kernel or the memlock limit refuses: everything works all the same, and
  // notes() tells of a refusal. The region must be unregistered before its memory is freed, else
  // the kernel goes on using the old pages. For engine "gds" it may be memory of a GPU, see there.
  bool register_buffer(std::span<std::byte> region);
  void unregister_buffer(std::span<std::byte> region);

  const Geometry& geometry() const { return geometry_; }
  const std::string& name() const { return name_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  virtual std::string_view engine() const = 0;
  virtual std::vector<std::string> notes() const;  // degradations, each once
  virtual Counters counters() const;
  // The model of a drive that is one by definition (simulated), else nothing.
  virtual std::optional<DeviceModel> exact_model() const;

  // ---- For engines and Batch ----

  enum class Next { kDone, kAgain };
  // Takes the outcome of a transfer: bytes moved, or -errno. kAgain: start the transfer's rest()
  // again. kDone: the transfer is over, the engine calls BatchState::finish() and forgets it.
  Next completed(Transfer& transfer, int64_t result, int64_t now_ns);
  virtual TransferQueue& queue() = 0;
  void note(const std::string& text) const;  // adds to notes(), once
  void check_process() const;  // kState in a forked child, where rings and threads do not exist
  void check_range(OpKind kind, uint64_t offset, uint64_t length) const;

 protected:
  struct Setup {
    std::string name = {};
    Geometry geometry = {};
    std::chrono::milliseconds timeout{30000};
    uint64_t capacity_limit = 0;  // bytes that reserve() may reach; 0: no limit
    uint64_t capacity = 0;        // bytes usable from the start
    std::vector<std::string> notes = {};
  };
  explicit BlockDevice(Setup setup);

  // Returns the new capacity. `bytes` is a multiple of the block and above capacity().
  virtual uint64_t reserve_impl(uint64_t bytes) = 0;
  virtual void flush_impl() = 0;
  virtual bool register_buffer_impl(std::span<std::byte> region);
  virtual void unregister_buffer_impl(std::span<std::byte> region);

  bool in_owner_process() const;

 private:
  void transfer_any(OpKind kind, uint64_t offset, std::byte* data, uint64_t length);
  void transfer_aligned(OpKind kind, uint64_t offset, std::byte* data, uint64_t length);
  void transfer_bounced(OpKind kind, uint64_t offset, std::byte* data, uint64_t length);

  const std::string name_;
  const Geometry geometry_;
  const std::chrono::milliseconds timeout_;
  const uint64_t capacity_limit_;
  const int owner_pid_;
  std::atomic<uint64_t> capacity_;
  std::mutex reserve_mutex_;
  std::mutex edge_mutex_;  // read-modify-write of partly covered blocks

  std::atomic<uint64_t> requests_[2] = {0, 0};
  std::atomic<uint64_t> bytes_[2] = {0, 0};
  std::atomic<uint64_t> short_transfers_{0};
  std::atomic<uint64_t> errors_{0};
  LatencyHistogram latency_[2];

  mutable std::mutex notes_mutex_;
  mutable std::vector<std::string> notes_;
};

}  // namespace swarm_kv::io
