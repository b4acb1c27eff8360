#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "core/parallel.h"
#include "core/query_tile.h"
#include "core/signature.h"

// Counts what the process allocates. Not inlined: the compiler would take the pairs of malloc and
// delete that it then sees for mistakes.
namespace {

std::atomic<int64_t> g_held{0};
std::atomic<int64_t> g_peak{0};

}  // namespace

[[gnu::noinline]] void* operator new(std::size_t bytes) {
  void* memory = std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  const int64_t held = g_held += static_cast<int64_t>(malloc_usable_size(memory));
  for (int64_t peak = g_peak; held > peak && !g_peak.compare_exchange_weak(peak, held);) {
  }
  return memory;
}

[[gnu::noinline]] void operator delete(void* memory) noexcept {
  g_held -= static_cast<int64_t>(malloc_usable_size(memory));
  std::free(memory);
}

[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  operator delete(memory);
}

// The default ones call those above, but not where a sanitizer brings its own.
void* operator new[](std::size_t bytes) { return operator new(bytes); }
void operator delete[](void* memory) noexcept { operator delete(memory); }
void operator delete[](void* memory, std::size_t) noexcept { operator delete(memory); }

namespace swarm_kv {
namespace {

template <typename Work>
int64_t peak_bytes(const Work& work) {
  const int64_t before = g_held;
  g_peak = before;
  work();
  return g_peak - before;
}

TEST(SignatureMemory, TheCounterCounts) {
  const auto allocate = [] { std::vector<float> values(1 << 20, 1.0f); };
  EXPECT_GE(peak_bytes(allocate), 4 << 20);
  EXPECT_LT(peak_bytes([] {}), 1 << 10);
}

// Scratch is a tile's, or follows the size of `bits`; not that of the keys or the number of heads
// or threads.
TEST(SignatureMemory, ScratchIsBounded) {
  struct Size {
    int64_t queries;
    int64_t entries;
  };
  constexpr int64_t kHeads = 4;
  constexpr int64_t kDim = 16;
  const int threads = num_threads();
  set_num_threads(4);
  for (const auto [queries, entries] : {Size{256, 40000}, Size{1000, 20000}}) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<fp16> q(kHeads * queries * kDim);
    std::vector<fp16> k(kHeads * entries * kDim);
    std::generate(q.begin(), q.end(), [&] { return fp16(normal(random)); });
    std::generate(k.begin(), k.end(), [&] { return fp16(normal(random)); });
    // Only the last queries have anything to do, to save time.
    std::vector<int64_t> position(queries, 0);
    std::fill(position.end() - 40, position.end(), entries);
    std::vector<int64_t> bits(entries * ((queries + 63) / 64));
    SignatureOptions options;
    options.window = 1;
    options.sinks = 1;
    const int64_t peak = peak_bytes([&] {
      activation_signatures({q.data(), kHeads, queries, kDim, queries * kDim, kDim},
                            {k.data(), kHeads, entries, kDim, entries * kDim, kDim},
                            position.data(), nullptr, options, bits.data());
    });
    const int64_t bits_bytes = std::ssize(bits) * 8;
    const int64_t tile_bytes = entries * kTile * static_cast<int64_t>(sizeof(float));
    EXPECT_GE(peak, tile_bytes) << "nothing was counted";
    EXPECT_LE(peak, std::max<int64_t>({bits_bytes, tile_bytes, 2 << 20}) + (1 << 20));
    EXPECT_LT(peak, std::ssize(k) * 4) << "the keys were converted as a whole";
  }
  set_num_threads(threads);
}

}  // namespace
}  // namespace swarm_kv
