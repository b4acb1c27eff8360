// Steps on a device: their copies, what is kept there, and in which order all of that happens. The
// streams are CopyStream's on an emulated CUDA runtime, whose work runs late and in random order.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/device_step.h"
#include "core/host_device.h"
#include "cuda_rig.h"
#include "numbered.h"
#include "ops/cuda/copy_stream.h"
#include "store_rig.h"

namespace swarm_kv::cuda {
namespace {

constexpr int64_t kEntries = 2000;
constexpr int64_t kOwn = 100000;  // what the sequence's own entries are filled with begins here
constexpr int kRows = 2;
constexpr unsigned kSeeds = kCases / 10;

// An order that a test leaves out.
enum class Missing {
  kNothing,
  kReadAfterCopy,    // attention reads a batch once it was copied
  kCopyAfterRead,    // a batch is copied over one that was read
  kCopyAfterMove,    // a window entry is copied to where the cache has moved away, or another was
  kStepAfterStep,    // in another stream than the last one
  kHostAfterCopies,  // bounce memory and staging memory are used again once they were copied
};

class Gpu : public CopyStream {
 public:
  explicit Gpu(Missing missing) : CopyStream(0), missing_(missing) {
    for (cudaStream_t& stream : compute_) cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  }
  ~Gpu() override {
    emulation::finish();
    for (const cudaStream_t stream : compute_) cudaStreamDestroy(stream);
  }

  void allocate(int64_t bytes) override {
    storage_.assign(bytes, std::byte{0xff});
    set_memory(storage_.data());
  }
  void begin() override { compute_in(current()); }
  void follow(int mark, Queue queue) override {
    const bool left_out =
        (missing_ == Missing::kReadAfterCopy && queue == kCompute && mark < DeviceTier::kRead) ||
        (missing_ == Missing::kCopyAfterRead && queue == kCopy && mark < DeviceTier::kEnd) ||
        (missing_ == Missing::kCopyAfterMove && queue == kCopy && mark == DeviceTier::kMoved) ||
        (missing_ == Missing::kStepAfterStep && queue == kCompute && mark == DeviceTier::kEnd);
    if (!left_out) CopyStream::follow(mark, queue);
  }
  void await(int mark) override {
    if (missing_ != Missing::kHostAfterCopies) CopyStream::await(mark);
  }

  cudaStream_t current() const { return compute_[current_]; }
  void compute_elsewhere() { current_ = 1 - current_; }

 private:
  const Missing missing_;
  cudaStream_t compute_[2];
  int current_ = 0;
  std::vector<std::byte> storage_;
};

struct Shape {
  int64_t runs = 250;      // longest run of neighbours that a step wants
  int64_t scattered = 60;  // most single entries
  int64_t own = 12;        // entries in the window
  uint64_t hbm_bytes = 0;
};

// A store on a device, whose "attention" looks at the bytes of each entry when its turn comes.
class Steps {
 public:
  Steps(Shape shape, Missing missing, unsigned seed)
      : shape_(shape), random_(seed), rig_(3, options()) {
    emulation::set_stream_seed(seed);
    gpu_ = std::make_shared<Gpu>(missing);
    const Numbered data(kEntries);
    segment_ = rig_.store->write(data.source(), kEntries, overlapping(kEntries), "layer 0");
    rig_.store->attach(gpu_, shape.hbm_bytes);
    for (int64_t i = 0; i < shape.own; ++i) grow();
  }

  // Takes steps; returns how often a wrong entry was attended to.
  int run(int steps) {
    for (int i = 0; i < steps; ++i) {
      if (shape_.own > 0) {
        grow();
        rig_.store->release({&window_.front().slot, 1});
        window_.pop_front();
      }
      if (random_.chance(0.3)) gpu_->compute_elsewhere();
      step();
    }
    emulation::finish();
    return wrong_;
  }

  void step() {
    std::vector<Ask> asks;
    const std::vector<int64_t> common = some();
    for (int row = 0; row < kRows; ++row) {
      std::vector<int64_t> entries = some();
      entries.insert(entries.end(), common.begin(), common.end());
      asks.push_back({{segment_}, {}, entries, kEntries});
    }
    std::vector<Row> rows;
    for (const Ask& ask : asks) rows.push_back(ask.row());
    std::vector<int64_t> slots, numbers;
    for (const Own& own : window_) {
      slots.push_back(own.slot);
      numbers.push_back(own.number);
    }
    std::vector<std::map<int64_t, int>> seen(kRows);
    std::vector<int> own_seen(slots.size());
    FetchSeconds seconds;
    step_on_device(
        *rig_.store, rows, slots, 0,
        [&](const DevicePart& part) {
          for (int row = 0; row < kRows; ++row) {
            for (int64_t i = part.delivery.rows[row]; i < part.delivery.rows[row + 1]; ++i) {
              if (part.slots[i] < 0) continue;
              ++seen[row][part.delivery.ids[i]];
              attend(part.delivery.ids[i], part.slots[i]);
            }
          }
          for (size_t i = 0; i < part.own.size(); ++i) {
            if (part.own[i] < 0) continue;
            ++own_seen[i];
            attend(numbers[i], part.own[i]);
          }
        },
        seconds);
    for (int row = 0; row < kRows; ++row) {
      std::map<int64_t, int> once;
      for (const int64_t entry : asks[row].entries) once[entry] = 1;
      EXPECT_EQ(seen[row], once);
    }
    EXPECT_EQ(own_seen, std::vector<int>(slots.size(), 1));
    EXPECT_LE(number_in(rig_.store->stats(), "used", "\"hbm\""), shape_.hbm_bytes);
  }

  Store& store() { return *rig_.store; }
  Gpu& gpu() { return *gpu_; }

 private:
  struct Own {
    int64_t slot;
    int64_t number;
  };

  static StoreOptions options() {
    StoreOptions options;
    options.dram_bytes = 3 << 19;  // a fifth of the entries fits into the cluster cache
    return options;
  }

  std::vector<int64_t> some() {
    std::vector<int64_t> entries;
    const int64_t run = random_.integer(0, shape_.runs);
    // Mostly the same ones, so that caches have something to keep.
    const int64_t first = random_.chance(0.5) ? 100 : random_.integer(0, kEntries - run);
    for (int64_t i = 0; i < run; ++i) entries.push_back(first + i);
    for (int64_t i = random_.integer(0, shape_.scattered); i > 0; --i) {
      entries.push_back(random_.integer(0, kEntries - 1));
    }
    return entries;
  }

  void grow() {
    const Numbered data(1, kOwn + grown_);
    window_.push_back({rig_.store->append(data.source(), 1)[0], kOwn + grown_});
    ++grown_;
  }

  void attend(int64_t number, int64_t slot) {
    emulation::enqueue(gpu_->current(), [this, number, slot] {
      wrong_ += !Pattern{}.matches(number, gpu_->memory() + slot);
    });
  }

  const Shape shape_;
  Generator random_;
  std::shared_ptr<Gpu> gpu_;
  Rig rig_;
  int64_t segment_ = 0;
  std::deque<Own> window_;
  int64_t grown_ = 0;
  int wrong_ = 0;
};

constexpr Shape kShapes[] = {
    {},
    {.hbm_bytes = 1},
    {.hbm_bytes = 8 << 10},
    {.hbm_bytes = 100 << 10},
    {.hbm_bytes = 2 << 20},
    {.runs = 700, .scattered = 0, .own = 0},
    {.runs = 0, .scattered = 700, .own = 100, .hbm_bytes = 48 << 10},
    {.runs = 0, .scattered = 0, .own = 500, .hbm_bytes = 1 << 20},
};

TEST(CudaDevice, EveryEntryIsThereWhenItIsAttendedTo) {
  for (const Shape& shape : kShapes) {
    for (unsigned seed = 0; seed < kSeeds; ++seed) {
      EXPECT_EQ(Steps(shape, Missing::kNothing, seed).run(8), 0);
    }
  }
}

// A missing order gives wrong bytes in a tenth of the runs at least, so in 200 it always shows.
bool shows(Missing missing, const Shape& shape) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    if (Steps(shape, missing, seed).run(8) > 0) return true;
  }
  return false;
}

TEST(CudaDevice, AMissingOrderShows) {
  EXPECT_TRUE(shows(Missing::kReadAfterCopy, {}));
  EXPECT_TRUE(shows(Missing::kCopyAfterRead, {.runs = 700}));
  EXPECT_TRUE(shows(Missing::kCopyAfterMove, {.runs = 20, .scattered = 5, .hbm_bytes = 9 << 10}));
  EXPECT_TRUE(shows(Missing::kStepAfterStep, {.hbm_bytes = 2 << 20}));
  EXPECT_TRUE(shows(Missing::kHostAfterCopies, {.runs = 0, .scattered = 700, .own = 0}));  // bounce
  EXPECT_TRUE(
      shows(Missing::kHostAfterCopies, {.runs = 700, .scattered = 0, .own = 0}));  // staging
}

TEST(CudaDevice, KeepsWhatStepsWantAgain) {
  for (const uint64_t hbm_bytes : {uint64_t{0}, uint64_t{2} << 20}) {
    Steps steps({.runs = 60, .scattered = 0, .hbm_bytes = hbm_bytes}, Missing::kNothing, 2);
    EXPECT_EQ(steps.run(20), 0);
    const std::string stats = steps.store().stats();
    EXPECT_EQ(number_in(stats, "limit", "\"hbm\""), hbm_bytes);
    EXPECT_EQ(number_in(stats, "window_entries", "\"hbm\""), hbm_bytes == 0 ? 0 : 12);
    EXPECT_EQ(number_in(stats, "hits", "\"hbm\"") > 100, hbm_bytes > 0);
    EXPECT_EQ(number_in(stats, "cached_entries", "\"hbm\"") > 60, hbm_bytes > 0);
  }
}

TEST(CudaDevice, FreedSegmentsLeaveTheDevice) {
  Steps steps({.runs = 60, .own = 0, .hbm_bytes = 2 << 20}, Missing::kNothing, 1);
  EXPECT_EQ(steps.run(10), 0);
  EXPECT_GT(number_in(steps.store().stats(), "cached_entries", "\"hbm\""), 0u);
  steps.store().free_segment(1);
  const std::string stats = steps.store().stats();
  EXPECT_EQ(number_in(stats, "cached_entries", "\"hbm\""), 0u);
  EXPECT_EQ(number_in(stats, "index"), 0u);
}

TEST(CudaDevice, RefusesToBeCaptured) {
  Steps steps({}, Missing::kNothing, 0);
  emulation::set_capturing(steps.gpu().current(), true);
  std::string message;
  EXPECT_EQ(kind_of([&] { steps.step(); }, &message), ErrorKind::kState);
  EXPECT_NE(message.find("CUDA graph"), std::string::npos);
  emulation::set_capturing(steps.gpu().current(), false);
  EXPECT_EQ(steps.run(2), 0);
}

TEST(CudaDevice, AFailedReadLeavesTheDeviceUsable) {
  Rig rig(1);
  const Numbered data(kEntries);
  const int64_t segment =
      rig.store->write(data.source(), kEntries, overlapping(kEntries), "layer 0");
  rig.store->attach(std::make_shared<HostDevice>(), 1 << 20);
  const std::vector<Ask> asks{{{segment}, {}, range(0, 400), kEntries}};
  const std::vector<Row> rows{asks[0].row()};
  FetchSeconds seconds;
  int parts = 0;
  const auto step = [&] {
    step_on_device(*rig.store, rows, {}, 0, [&](const DevicePart&) { ++parts; }, seconds);
  };
  rig.drives[0]->add_rule({.count = UINT32_MAX});
  EXPECT_EQ(kind_of(step), ErrorKind::kStorage);
  rig.drives[0]->clear_rules();
  step();
  EXPECT_GE(parts, 3);
  rig.store->close();  // refused while a ticket is out
}

TEST(CudaDevice, AStoreGetsOneDeviceOnceItKnowsItsEntries) {
  Rig rig;
  const auto attach = [&] { rig.store->attach(std::make_shared<HostDevice>(), 0); };
  EXPECT_EQ(kind_of(attach), ErrorKind::kState);
  rig.store->set_entry_bytes(kEntryBytes);
  attach();
  EXPECT_EQ(kind_of(attach), ErrorKind::kState);
}

// HostDevice in the stead of a GPU: as late as orders allow, too.
TEST(HostDevice, UploadsWhenTheyAreWaitedFor) {
  HostDevice device;
  device.allocate(64);
  const std::vector<std::byte> one(16, std::byte{1}), two(16, std::byte{2});
  device.upload(0, one.data(), 16);
  device.record(0, Device::kCopy);
  device.upload(16, two.data(), 16);
  device.record(1, Device::kCopy);
  EXPECT_EQ(device.memory()[0], std::byte{0xff});
  device.follow(0, Device::kCompute);
  EXPECT_EQ(device.memory()[0], std::byte{1});
  EXPECT_EQ(device.memory()[16], std::byte{0xff});
  device.await(1);
  EXPECT_EQ(device.memory()[16], std::byte{2});
  device.move(32, 16, 16);
  EXPECT_EQ(device.memory()[32], std::byte{2});
}

}  // namespace
}  // namespace swarm_kv::cuda
