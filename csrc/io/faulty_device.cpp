#include "io/faulty_device.h"

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <list>
#include <mutex>
#include <thread>
#include <utility>

#include "io/aligned_buffer.h"
#include "io/device_model.h"
#include "io/error.h"

namespace swarm_kv::io {

// The queue of transfers with the moment at which each runs, and the thread that runs them.
class FaultyDevice::Line : public TransferQueue {
 public:
  explicit Line(std::shared_ptr<BlockDevice> inner) : shared_(std::make_shared<Shared>()) {
    shared_->inner = std::move(inner);
    worker_ = std::thread([shared = shared_] { run(*shared); });
  }

  ~Line() override {
    {
      std::lock_guard lock(shared_->mutex);
      shared_->stop = true;
    }
    shared_->work.notify_all();
    if (worker_.get_id() == std::this_thread::get_id()) {
      worker_.detach();
    } else if (worker_.joinable()) {
      worker_.join();
    }
  }

  void abandon() { worker_.detach(); }

  void submit(QueueShare& share) override {
    {
      std::lock_guard lock(shared_->mutex);
      for (Transfer* transfer : share.transfers) enqueue(*shared_, *transfer);
    }
    shared_->work.notify_all();
  }

  void progress(QueueShare&) override {}

  void wait(QueueShare& share, uint32_t open, Clock::time_point deadline) override {
    share.batch->wait(open, deadline);
  }

  void cancel(QueueShare& share) override {
    std::vector<Transfer*> dropped;
    {
      std::lock_guard lock(shared_->mutex);
      std::erase_if(shared_->waiting, [&](const Entry& entry) {
        if (entry.transfer->share != &share || !entry.rule.cancellable) return false;
        dropped.push_back(entry.transfer);
        return true;
      });
    }
    for (Transfer* transfer : dropped) {
      transfer->device->completed(*transfer, -ECANCELED, now_ns());
      const auto last = share.batch->finish(share);
    }
  }

  void add_rule(const FaultRule& rule) {
    std::lock_guard lock(shared_->mutex);
    shared_->rules.push_back(rule);
  }

  void clear_rules() {
    {
      std::lock_guard lock(shared_->mutex);
      shared_->rules.clear();
      for (Entry& entry : shared_->waiting) {
        if (entry.rule.fault == FaultKind::kHold) entry.due = Clock::now();
      }
    }
    shared_->work.notify_all();
  }

  uint64_t faults() const {
    std::lock_guard lock(shared_->mutex);
    return shared_->faults;
  }

 private:
  struct Entry {
    Transfer* transfer;
    Clock::time_point due;
    bool faulty;
    FaultRule rule;
  };
  struct Shared {
    std::shared_ptr<BlockDevice> inner;
    std::mutex mutex;
    std::condition_variable work;
    std::list<Entry> waiting;
    std::vector<FaultRule> rules;
    uint64_t faults = 0;
    bool stop = false;
  };

  static void enqueue(Shared& shared, Transfer& transfer) {
    Entry entry{&transfer, Clock::now(), false, {}};
    const uint64_t begin = transfer.rest_offset();
    const uint64_t end = begin + transfer.rest_length();
    for (FaultRule& rule : shared.rules) {
      const bool touches =
          end > rule.offset && (begin < rule.offset || begin - rule.offset < rule.length);
      if (rule.count == 0 || rule.kind != transfer.kind || !touches) continue;
      if (rule.count != UINT32_MAX) --rule.count;
      ++shared.faults;
      entry.faulty = true;
      entry.rule = rule;
      if (rule.fault == FaultKind::kDelay) entry.due += rule.delay;
      if (rule.fault == FaultKind::kHold) entry.due = Clock::time_point::max();
      break;
    }
    shared.waiting.push_back(entry);
  }

  static void run(Shared& shared) {
    for (;;) {
      Entry entry;
      {
        std::unique_lock lock(shared.mutex);
        for (;;) {
          if (shared.waiting.empty()) {
            if (shared.stop) return;
            shared.work.wait(lock);
            continue;
          }
          const auto next =
              std::min_element(shared.waiting.begin(), shared.waiting.end(),
                               [](const Entry& a, const Entry& b) { return a.due < b.due; });
          if (next->due <= Clock::now()) {
            entry = *next;
            shared.waiting.erase(next);
            break;
          }
          // A cancellation may remove the entry meanwhile; a moment far away does not convert.
          const auto due = std::min(next->due, Clock::now() + std::chrono::hours(1));
          shared.work.wait_until(lock, due);
        }
      }
      Transfer& transfer = *entry.transfer;
      QueueShare& share = *transfer.share;
      const int64_t result = move(*shared.inner, entry);
      if (transfer.device->completed(transfer, result, now_ns()) == Next::kAgain) {
        std::lock_guard lock(shared.mutex);
        enqueue(shared, transfer);
        continue;
      }
      const auto last = share.batch->finish(share);
    }
  }

  // Runs the rest of a transfer as its rule wants it; the result is what completed() expects.
  static int64_t move(BlockDevice& inner, const Entry& entry) {
    const Transfer& transfer = *entry.transfer;
    const FaultRule& rule = entry.rule;
    const uint32_t length = transfer.rest_length();
    uint32_t part = length;
    int64_t claimed = length;
    if (entry.faulty) {
      if (rule.fault == FaultKind::kError) return -rule.error;
      if (rule.fault == FaultKind::kShort || rule.fault == FaultKind::kTorn) {
        part = std::min(length, rule.keep);
      }
      if (rule.fault == FaultKind::kShort) claimed = part;
    }
    const bool corrupt = entry.faulty && rule.fault == FaultKind::kCorrupt;
    std::span<std::byte> data(transfer.rest_data(), part);
    try {
      if (transfer.kind == OpKind::kRead) {
        inner.read(transfer.rest_offset(), data);
        if (corrupt) data[part / 2] ^= std::byte{1};
      } else if (corrupt) {
        const auto copy = allocate_aligned(part, inner.geometry().memory_alignment);
        std::memcpy(copy.get(), data.data(), part);
        copy.get()[part / 2] ^= std::byte{1};
        inner.write(transfer.rest_offset(), {copy.get(), part});
      } else {
        inner.write(transfer.rest_offset(), data);
      }
    } catch (const Error&) {
      return -EIO;
    }
    return claimed;
  }

  const std::shared_ptr<Shared> shared_;
  std::thread worker_;
};

FaultyDevice::FaultyDevice(std::shared_ptr<BlockDevice> inner)
    : BlockDevice({.name = inner->name(),
                   .geometry = inner->geometry(),
                   .timeout = inner->timeout(),
                   .capacity = inner->capacity()}),
      inner_(std::move(inner)),
      line_(std::make_unique<Line>(inner_)) {}

FaultyDevice::~FaultyDevice() {
  if (!in_owner_process()) line_->abandon();
}

void FaultyDevice::add_rule(const FaultRule& rule) { line_->add_rule(rule); }
void FaultyDevice::clear_rules() { line_->clear_rules(); }
uint64_t FaultyDevice::faults() const { return line_->faults(); }
TransferQueue& FaultyDevice::queue() { return *line_; }

std::vector<std::string> FaultyDevice::notes() const {
  std::vector<std::string> all = inner_->notes();
  const std::vector<std::string> own = BlockDevice::notes();
  all.insert(all.end(), own.begin(), own.end());
  return all;
}

std::optional<DeviceModel> FaultyDevice::exact_model() const { return inner_->exact_model(); }

uint64_t FaultyDevice::reserve_impl(uint64_t bytes) {
  inner_->reserve(bytes);
  return inner_->capacity();
}

bool FaultyDevice::register_buffer_impl(std::span<std::byte> region) {
  return inner_->register_buffer(region);
}

void FaultyDevice::unregister_buffer_impl(std::span<std::byte> region) {
  inner_->unregister_buffer(region);
}

}  // namespace swarm_kv::io
