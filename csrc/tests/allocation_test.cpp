// The steady state of fetching allocates nothing.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <new>

#include "tests/numbered.h"
#include "tests/store_rig.h"

namespace {
std::atomic<int64_t> g_allocations{0};
}  // namespace

// Not inlined: the compiler would take the pairs of malloc and delete that it then sees for
// mistakes.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++g_allocations;
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  operator delete(memory);
}

namespace swarm_kv {
namespace {

// A store whose drives are `engine`, without faults between.
struct Plain {
  std::string directory = testing::TempDir();
  std::vector<std::shared_ptr<io::BlockDevice>> drives;
  std::unique_ptr<Store> store;
  int64_t segment = 0;

  Plain(const std::string& engine, const std::string& router) {
    std::vector<io::DeviceOptions> devices(3);
    for (auto& device : devices) {
      device.path = directory;
      device.engine = engine;
    }
    StoreOptions options;
    options.dram_bytes = 4 << 20;
    options.staging_bytes = 512 << 10;
    options.model = {1e-6, 1e-9};
    options.router = router;
    drives = io::open_devices(devices);
    store = std::make_unique<Store>(options, drives);
    segment = store->write(Numbered(600).source(), 600, overlapping(600), "layer 0");
  }
};

// One decoding step of two rows: a prefetch, what rides on it, and a pass that takes rounds.
struct Steps {
  std::vector<int64_t> clusters = range(0, 30), entries = range(200, 320), all = range(0, 600);
  std::vector<int64_t> guess = range(220, 300);
  Delivery delivery;
  int64_t delivered = 0;

  void run(Store& store, int64_t segment, int count) {
    const std::array<int64_t, 1> segments{segment};
    const std::array<Row, 2> rows{{{segments, clusters, entries, 600}, {segments, {}, guess, 600}}};
    const std::array<Row, 1> ahead{{{segments, {}, guess, 600}}};
    const std::array<Row, 1> whole{{{segments, {}, all, 600}}};
    for (int i = 0; i < count; ++i) {
      const int64_t early = store.submit(ahead, Purpose::kPrefetch, 0, delivery);
      finish(store, store.submit(rows, Purpose::kStream, early, delivery));
      finish(store, store.submit(whole, Purpose::kStream, 0, delivery));
    }
  }
  void finish(Store& store, int64_t ticket) {
    delivered += static_cast<int64_t>(delivery.ids.size());
    for (bool more = true; more;) {
      more = store.wait(ticket, delivery);
      delivered += static_cast<int64_t>(delivery.ids.size());
    }
    store.release_ticket(ticket);
  }
};

TEST(Allocation, AStepThatWasDoneBeforeAllocatesNothing) {
  for (const std::string router : {"swarm", "static", "dedup_only", "balance_only"}) {
    for (const std::string engine : {"memory", "simulated", "auto"}) {
      Plain plain(engine, router);
      Steps steps;
      const int64_t fresh = g_allocations;
      steps.run(*plain.store, plain.segment, 1);
      EXPECT_GT(g_allocations, fresh);  // the count works, and a new store has it all to do
      // How reads are shared out and arrive depends on how fast the drives seem, so that lists
      // still grow now and then at first.
      int64_t allocated = -1;
      for (int block = 0; block < 50 && allocated != 0; ++block) {
        steps.delivered = 0;
        const int64_t before = g_allocations;
        steps.run(*plain.store, plain.segment, 10);
        allocated = g_allocations - before;
        EXPECT_EQ(steps.delivered, 10 * (320 + 80 + 600));
      }
      EXPECT_EQ(allocated, 0) << router << " on " << engine;
    }
  }
}

}  // namespace
}  // namespace swarm_kv
