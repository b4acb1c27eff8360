#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <random>
#include <vector>

#include "core/clustering.h"

namespace {

std::atomic<int64_t> g_bytes{0};
std::atomic<int64_t> g_peak{0};

void count_bytes(int64_t bytes) {
  const int64_t now = g_bytes += bytes;
  for (int64_t peak = g_peak; now > peak && !g_peak.compare_exchange_weak(peak, now);) {
  }
}

}  // namespace

// Not inlined: compilers would warn that what `new` returned is freed.
__attribute__((noinline)) void* operator new(size_t size) {
  void* memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  count_bytes(static_cast<int64_t>(malloc_usable_size(memory)));
  return memory;
}

__attribute__((noinline)) void operator delete(void* memory) noexcept {
  if (memory != nullptr) count_bytes(-static_cast<int64_t>(malloc_usable_size(memory)));
  std::free(memory);
}

void operator delete(void* memory, size_t) noexcept { operator delete(memory); }

namespace swarm_kv {
namespace {

// Peak bytes per entry, without the signatures themselves and the result.
double bytes_per_entry(int64_t entries, int64_t words, int64_t exact_limit) {
  std::mt19937_64 random(1);
  std::vector<int64_t> bits(entries * words);
  std::vector<int64_t> groups(entries / 20 * words);
  for (int64_t& group : groups) group = static_cast<int64_t>(random() & random() & random());
  for (int64_t i = 0; i < entries; ++i) {
    const int64_t group = static_cast<int64_t>(random() % (entries / 20));
    for (int64_t w = 0; w < words; ++w) {
      bits[i * words + w] =
          groups[group * words + w] & static_cast<int64_t>(random() | random() | random());
    }
  }
  const ClusterOptions options{.max_size = 4, .max_replicas = 1, .min_activation = 1};
  g_peak = g_bytes.load();
  const int64_t before = g_bytes;
  const Clusters clusters = cluster_signatures(bits.data(), entries, words, options, exact_limit);
  EXPECT_GT(clusters.count(), entries / 10);
  const auto result =
      static_cast<int64_t>(4 * (clusters.members.capacity() + clusters.offsets.capacity()));
  return static_cast<double>(g_peak - before - result) / entries;
}

TEST(ClusteringMemory, DoesNotGrowWithTheQueries) {
  constexpr int64_t kEntries = 12000;
  for (const int64_t words : {2, 8}) {
    // The sample that densities are counted against does not grow with the entries.
    const double sample = 4096.0 * 8.0 * static_cast<double>(words) / kEntries;
    EXPECT_LT(bytes_per_entry(kEntries, words, 0), 96.0 + sample) << words;
  }
}

TEST(ClusteringMemory, ACopyOfTheSignaturesWouldShow) {
  EXPECT_GT(bytes_per_entry(3000, 16, kExactLimit), 16.0 * 8.0 + 16.0);
}

}  // namespace
}  // namespace swarm_kv
