#include "core/signature_forest.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <utility>

#include "core/mix.h"
#include "core/parallel.h"
#include "core/simd.h"

namespace swarm_kv {
namespace {

// Min-hashes of 16 bits in one key: four of them tell millions of signatures apart.
constexpr int kDepth = 4;
// Trees that are built at once: each takes memory while it is.
constexpr int kTreesAtOnce = 2;
// Slots looked at per slot that is wanted, so that passed-over ones cannot make a look-up long.
constexpr int64_t kPatience = 4;

// Signatures that one task hashes.
constexpr int64_t kRows = 4096;

// A hash per tree and level, of a query or the least of several.
typedef uint16_t Hashes __attribute__((vector_size(2 * kDepth * kTreesAtOnce)));

using Keys = std::array<uint64_t, kTreesAtOnce>;

Hashes query_hashes(uint64_t seed) {
  Hashes hashes{};
  for (int i = 0; i < kTreesAtOnce * kDepth; ++i) {
    hashes[i] = static_cast<uint16_t>(mix(mix(seed) + i * kMixStep));
  }
  return hashes;
}

SWARM_KV_CLONES Keys min_hashes(const uint64_t* row, int64_t words, const Hashes* hashes) {
  Hashes least = ~Hashes{};
  for (int64_t w = 0; w < words; ++w) {
    for (uint64_t rest = row[w]; rest != 0; rest &= rest - 1) {
      const Hashes query = hashes[w * 64 + std::countr_zero(rest)];
      least = query < least ? query : least;
    }
  }
  Keys keys{};
  for (int i = 0; i < kTreesAtOnce * kDepth; ++i) {
    keys[i / kDepth] = keys[i / kDepth] << 16 | least[i];
  }
  return keys;
}

// A set of at most `capacity` slots, by open addressing.
class SlotSet {
 public:
  explicit SlotSet(int64_t capacity)
      : table_(std::bit_ceil(static_cast<uint64_t>(2 * capacity)), kNone) {}

  // Whether it was not in the set.
  bool insert(int32_t slot) {
    const uint64_t mask = table_.size() - 1;
    uint64_t i = (slot * kMixStep >> 32) & mask;
    for (; table_[i] != kNone; i = (i + 1) & mask) {
      if (table_[i] == slot) return false;
    }
    table_[i] = slot;
    return true;
  }

 private:
  static constexpr int32_t kNone = -1;
  std::vector<int32_t> table_;
};

}  // namespace

SignatureForest::SignatureForest(const HotEntries& hot, int64_t trees, uint64_t seed)
    : trees_(trees) {
  for (int64_t first = 0; first < trees; first += kTreesAtOnce) {
    std::vector<Hashes> hashes(hot.words() * 64);
    for (size_t q = 0; q < hashes.size(); ++q) {
      hashes[q] = query_hashes(mix(mix(seed) + first) + q * kMixStep);
    }
    std::vector<Keys> keys(hot.count());
    parallel_for(0, hot.count(), kRows, [&](int64_t begin, int64_t end) {
      for (int64_t slot = begin; slot < end; ++slot) {
        keys[slot] = min_hashes(hot.row(slot), hot.words(), hashes.data());
      }
    });
    parallel_for(0, std::min<int64_t>(kTreesAtOnce, trees - first), 1, [&](int64_t t, int64_t) {
      Tree& tree = trees_[first + t];
      tree.order.resize(hot.count());
      std::iota(tree.order.begin(), tree.order.end(), 0);
      std::sort(tree.order.begin(), tree.order.end(), [&](int32_t a, int32_t b) {
        return std::pair(keys[a][t], a) < std::pair(keys[b][t], b);
      });
      tree.position.resize(hot.count());
      for (int64_t i = 0; i < hot.count(); ++i) {
        tree.position[tree.order[i]] = static_cast<int32_t>(i);
      }
    });
  }
}

void SignatureForest::neighbours(int32_t slot, int64_t reach, Range range,
                                 const std::vector<bool>& full,
                                 std::vector<int32_t>& neighbours) const {
  neighbours.clear();
  SlotSet seen(2 * reach * static_cast<int64_t>(trees_.size()));
  for (const Tree& tree : trees_) {
    for (const int step : {-1, 1}) {
      int64_t wanted = reach;
      int64_t looks = reach * kPatience;
      const auto end = static_cast<int64_t>(tree.order.size());
      for (int64_t i = tree.position[slot] + step; i >= 0 && i < end && wanted > 0 && looks > 0;
           i += step, --looks) {
        const int32_t other = tree.order[i];
        if (other < range.begin || other >= range.end || full[other]) continue;
        if (seen.insert(other)) neighbours.push_back(other);
        --wanted;
      }
    }
  }
}

}  // namespace swarm_kv
