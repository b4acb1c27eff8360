#include "core/signature.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <vector>

#include "core/parallel.h"
#include "core/query_tile.h"
#include "core/top_entries.h"
#include "io/error.h"

namespace swarm_kv {
namespace {

constexpr int kWordBits = 64;
constexpr int64_t kMostWaveTiles = 4;
// Scratch that needs no reason: waves of few entries are made longer up to it.
constexpr int64_t kSmallScratch = (int64_t{2} << 20) / sizeof(float);
// Parts into which the keys are cut for threads. Fixed, since sums depend on them.
constexpr int64_t kMostParts = 128;
// Above this many keys threads share each tile's selection; below, they take a tile each.
constexpr int64_t kManyKeys = 1 << 15;

// A tile's bits are written as two bytes at their place in a word.
static_assert(std::endian::native == std::endian::little);

void check(const HeadRows& q, const HeadRows& k, const int64_t* q_position, const float* lse,
           const SignatureOptions& options) {
  check_signature_sizes({q.heads, q.rows, q.dim, k.heads, k.rows, k.dim}, options);
  for (int64_t t = 0; t < q.rows; ++t) {
    if (q_position[t] < 0) {
      throw Error(ErrorKind::kArgument, "activation_signatures: q_position[" + std::to_string(t) +
                                            "] must be at least 0, got " +
                                            std::to_string(q_position[t]));
    }
  }
  check_signature_values(largest_magnitude(q), largest_magnitude(k),
                         lse == nullptr ? 0.0f : largest_magnitude(lse, q.heads * q.rows), q.dim,
                         options.scale);
}

// One call's work, wave by wave: a few tiles of queries against all keys, so that each block of
// keys is read from memory once for all of them.
class Profiler {
 public:
  Profiler(const HeadRows& q, const HeadRows& k, const int64_t* q_position, const float* lse,
           const SignatureOptions& options, int64_t* bits)
      : q_(q),
        k_(k),
        q_position_(q_position),
        lse_(lse),
        options_(options),
        bits_(bits),
        budget_(activation_budget(options, k.rows)) {
    const int64_t tiles = (q.rows + kTile - 1) / kTile;
    // kTile floats per tile against num_queries / 8 bytes of bits: 1/32 of the tiles is as much.
    const int64_t affordable = std::max(tiles / 32, kSmallScratch / (k.rows * kTile));
    wave_tiles_ = std::min(tiles, std::clamp<int64_t>(affordable, 1, kMostWaveTiles));
    probabilities_ = std::make_unique_for_overwrite<float[]>(wave_tiles_ * k.rows * kTile);
    queries_ = std::make_unique_for_overwrite<float[]>(wave_tiles_ * q.heads * q.dim * kTile);
    wave_lse_.resize(wave_tiles_ * q.heads * kTile);
  }

  void run() {
    for (int64_t first = 0; first < q_.rows; first += wave_tiles_ * kTile) {
      begin_wave(first);
      if (last_key(&QueryTile::max_eligible) <= options_.sinks) continue;
      load_queries();
      if (lse_ == nullptr) {
        compute_lse();
      } else {
        load_lse();
      }
      if (options_.heads == HeadAggregation::kUnion) {
        for (int64_t head = 0; head < q_.heads; ++head) activate(head, head + 1);
      } else {
        activate(0, q_.heads);
      }
    }
  }

 private:
  // Lanes past the last query repeat it with nothing eligible, and so set no bits.
  int64_t query(int64_t tile, int lane) const {
    return std::min(first_query_ + tile * kTile + lane, q_.rows - 1);
  }

  void begin_wave(int64_t first_query) {
    first_query_ = first_query;
    tiles_.clear();
    for (int64_t i = 0; i < wave_tiles_ && first_query + i * kTile < q_.rows; ++i) {
      QueryTile& tile = tiles_.emplace_back();
      for (int l = 0; l < kTile; ++l) {
        const int64_t position = q_position_[query(i, l)];
        tile.seen[l] = static_cast<int32_t>(std::min(position, k_.rows - 1) + 1);
        const int64_t last = std::clamp<int64_t>(position - options_.window, -1, k_.rows - 1);
        const bool exists = first_query + i * kTile + l < q_.rows;
        tile.eligible[l] = exists ? static_cast<int32_t>(last + 1) : 0;
      }
      tile.max_seen = *std::max_element(tile.seen, tile.seen + kTile);
      tile.min_seen = *std::min_element(tile.seen, tile.seen + kTile);
      tile.max_eligible = *std::max_element(tile.eligible, tile.eligible + kTile);
    }
  }

  int64_t last_key(int32_t QueryTile::* limit) const {
    int64_t last = 0;
    for (const QueryTile& tile : tiles_) last = std::max<int64_t>(last, tile.*limit);
    return last;
  }

  float* lanes(std::vector<float>& values, int64_t tile, int64_t head) const {
    return values.data() + (tile * q_.heads + head) * kTile;
  }

  float* tile_queries(int64_t tile, int64_t head) const {
    return queries_.get() + (tile * q_.heads + head) * q_.dim * kTile;
  }

  void load_queries() {
    const float scale = static_cast<float>(options_.scale);
    std::vector<float> row(q_.dim);
    for (int64_t i = 0; i < std::ssize(tiles_); ++i) {
      for (int64_t head = 0; head < q_.heads; ++head) {
        float* out = tile_queries(i, head);
        for (int l = 0; l < kTile; ++l) {
          copy_rows(q_, head, query(i, l), 1, row.data());
          for (int64_t d = 0; d < q_.dim; ++d) out[d * kTile + l] = row[d] * scale;
        }
      }
    }
  }

  void load_lse() {
    for (int64_t i = 0; i < std::ssize(tiles_); ++i) {
      for (int64_t head = 0; head < q_.heads; ++head) {
        float* out = lanes(wave_lse_, i, head);
        for (int l = 0; l < kTile; ++l) out[l] = lse_[head * q_.rows + query(i, l)];
      }
    }
  }

  // Scores the keys [first, last) block by block with the query heads [first_head, last_head):
  // calls visit(tile index, head, first key, keys, scores) for each tile that has keys of the block
  // below its `limit`.
  template <typename Visit>
  void score_blocks(int64_t first, int64_t last, int64_t first_head, int64_t last_head,
                    int32_t QueryTile::* limit, const Visit& visit) const {
    const int64_t group = q_.heads / k_.heads;
    const auto scratch = std::make_unique_for_overwrite<float[]>(kBlockKeys * k_.dim);
    alignas(64) float scores[kBlockKeys * kTile];
    for (int64_t block = first; block < last; block += kBlockKeys) {
      const int64_t count = std::min(kBlockKeys, last - block);
      const float* keys = nullptr;
      for (int64_t head = first_head; head < last_head; ++head) {
        if (head == first_head || head % group == 0) {
          keys = rows_as_float(k_, head / group, block, count, scratch.get());
        }
        for (int64_t i = 0; i < std::ssize(tiles_); ++i) {
          if (tiles_[i].*limit <= block) continue;
          score_keys(tile_queries(i, head), keys, count, k_.dim, scores);
          visit(i, head, block, count, scores);
        }
      }
    }
  }

  // Keys per part when [0, keys) is cut for threads: whole blocks.
  static int64_t part_size(int64_t keys) {
    const int64_t blocks = (keys + kBlockKeys - 1) / kBlockKeys;
    return (blocks + kMostParts - 1) / kMostParts * kBlockKeys;
  }

  void compute_lse() {
    const int64_t last = last_key(&QueryTile::max_seen);
    const int64_t size = part_size(last);
    const int64_t lists = std::ssize(tiles_) * q_.heads;  // of lanes
    std::vector<Normaliser> partial((last + size - 1) / size * lists);
    parallel_for(0, last, size, [&](int64_t first, int64_t end) {
      Normaliser* part = partial.data() + first / size * lists;
      score_blocks(first, end, 0, q_.heads, &QueryTile::max_seen,
                   [&](int64_t tile, int64_t head, int64_t block, int64_t count, float* scores) {
                     add_scores(tiles_[tile], block, count, scores, part[tile * q_.heads + head]);
                   });
    });
    for (int64_t list = 0; list < lists; ++list) {
      Normaliser total;
      for (int64_t i = list; i < std::ssize(partial); i += lists) add_normaliser(partial[i], total);
      for (int l = 0; l < kTile; ++l) wave_lse_[list * kTile + l] = total.log_sum(l);
    }
  }

  // Sets the bits of what the query heads [first_head, last_head) activate together. Ranking by the
  // sum is ranking by the mean.
  void activate(int64_t first_head, int64_t last_head) {
    const int64_t tile_stride = k_.rows * kTile;
    const int64_t last = last_key(&QueryTile::max_eligible);
    const auto add =
        options_.heads == HeadAggregation::kMax ? max_probabilities : add_probabilities;
    parallel_for(0, last, part_size(last), [&](int64_t first, int64_t end) {
      for (int64_t i = 0; i < std::ssize(tiles_); ++i) {
        std::fill_n(probabilities_.get() + i * tile_stride + first * kTile, (end - first) * kTile,
                    0.0f);
      }
      score_blocks(first, end, first_head, last_head, &QueryTile::max_eligible,
                   [&](int64_t tile, int64_t head, int64_t block, int64_t count, float* scores) {
                     add(scores, count, lanes(wave_lse_, tile, head),
                         probabilities_.get() + tile * tile_stride + block * kTile);
                   });
    });

    std::vector<Selection> selections(tiles_.size());
    const auto select = [&](int64_t first, int64_t end) {
      select_top(tiles_.data() + first, end - first, options_.sinks, budget_,
                 probabilities_.get() + first * tile_stride, tile_stride,
                 selections.data() + first);
    };
    if (last > kManyKeys) {
      select(0, std::ssize(tiles_));
    } else {
      parallel_for(0, std::ssize(tiles_), 1, select);
    }
    const int64_t row_bytes = (q_.rows + kWordBits - 1) / kWordBits * (kWordBits / 8);
    parallel_for(0, std::ssize(tiles_), 1, [&](int64_t i, int64_t) {
      std::byte* tile_bits = reinterpret_cast<std::byte*>(bits_) + (first_query_ + i * kTile) / 8;
      set_bits(tiles_[i], options_.sinks, probabilities_.get() + i * tile_stride, selections[i],
               tile_bits, row_bytes);
    });
  }

  const HeadRows& q_;
  const HeadRows& k_;
  const int64_t* const q_position_;
  const float* const lse_;
  const SignatureOptions& options_;
  int64_t* const bits_;
  const int32_t budget_;
  int64_t wave_tiles_;
  std::unique_ptr<float[]> probabilities_;  // [wave_tiles][num_entries][kTile]
  std::unique_ptr<float[]> queries_;        // [wave_tiles][heads_q][dim][kTile], scaled
  std::vector<float> wave_lse_;             // [wave_tiles][heads_q][kTile]
  int64_t first_query_ = 0;
  std::vector<QueryTile> tiles_;  // of the current wave
};

}  // namespace

void activation_signatures(const HeadRows& q, const HeadRows& k, const int64_t* q_position,
                           const float* lse, const SignatureOptions& options, int64_t* bits) {
  check(q, k, q_position, lse, options);
  const int64_t words = (q.rows + kWordBits - 1) / kWordBits;
  std::fill_n(bits, k.rows * words, 0);
  if (k.rows == 0 || q.rows == 0) return;
  Profiler(q, k, q_position, lse, options, bits).run();
}

}  // namespace swarm_kv
