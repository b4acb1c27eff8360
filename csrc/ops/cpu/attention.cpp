#include "ops/cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "core/flush_denormals.h"
#include "ops/cpu/threads.h"
#include "ops/cpu/vector.h"

namespace swarm_kv::cpu {
namespace {

// Entries taken at a time: their keys of one head stay in the first-level cache.
constexpr int64_t kBlock = 64;
// Fewer entries are not worth a thread of their own.
constexpr int64_t kMinChunk = 256;

// Part of one row's list, and where its partial result goes.
struct Chunk {
  int64_t row;
  int64_t first;  // into slots
  int64_t last;
  int64_t ahead = 0;  // the thread goes on with what follows up to here
};

// A partial softmax of one row: out is not yet divided by sum, and every exponential is relative to
// max.
template <typename Acc>
struct Partial {
  Acc* out;  // [query_heads, dim]
  Acc* max;  // [query_heads]
  Acc* sum;  // [query_heads]
};

SWARM_KV_INLINE float exp_nonpositive(float x) { return fast_expf(x); }
SWARM_KV_INLINE double exp_nonpositive(double x) { return std::exp(x); }

// The shift that exponentials are relative to: -inf, which no value exceeded, would make inf - inf
// of every score.
template <typename Acc>
SWARM_KV_INLINE Acc finite_shift(Acc max) {
  return max == -std::numeric_limits<Acc>::infinity() ? Acc(0) : max;
}

// The heads' rows as Acc: in place where the pool holds Acc, else widened into `wide`.
template <typename T, typename Acc>
SWARM_KV_INLINE void widen(const T* source, const int64_t* slots, int64_t count, int64_t dim,
                           Acc* wide, const Acc** rows) {
  if constexpr (std::is_same_v<T, Acc>) {
    for (int64_t b = 0; b < count; ++b) rows[b] = source + slots[b];
  } else {
    if constexpr (std::is_same_v<T, fp16>) {
      to_float_rows(source, slots, count, wide, dim);
    } else {
      for (int64_t b = 0; b < count; ++b) {
        const T* row = source + slots[b];
        for (int64_t d = 0; d < dim; ++d) wide[b * dim + d] = static_cast<Acc>(row[d]);
      }
    }
    for (int64_t b = 0; b < count; ++b) rows[b] = wide + b * dim;
  }
}

// out[h] = rescale[h] * out[h] + sum over b of weights[h * kBlock + b] * values[b], for kHeads
// rows.
template <int kBytes, int kHeads, typename Acc>
SWARM_KV_INLINE void accumulate_rows(const Acc* weights, const Acc* rescale,
                                     const Acc* const* values, int64_t count, int64_t dim,
                                     Acc* out) {
  using V = typename Vec<Acc, kBytes>::type;
  constexpr int64_t kLanes = Vec<Acc, kBytes>::kLanes;
  int64_t d = 0;
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes) {
    V low[kHeads], high[kHeads];
    for (int h = 0; h < kHeads; ++h) {
      load(out + h * dim + d, low[h]);
      load(out + h * dim + d + kLanes, high[h]);
      low[h] *= rescale[h];
      high[h] *= rescale[h];
    }
    for (int64_t b = 0; b < count; ++b) {
      V first, second;
      load(values[b] + d, first);
      load(values[b] + d + kLanes, second);
      for (int h = 0; h < kHeads; ++h) {
        low[h] += weights[h * kBlock + b] * first;
        high[h] += weights[h * kBlock + b] * second;
      }
    }
    for (int h = 0; h < kHeads; ++h) {
      store(low[h], out + h * dim + d);
      store(high[h], out + h * dim + d + kLanes);
    }
  }
  for (; d < dim; ++d) {
    for (int h = 0; h < kHeads; ++h) {
      Acc sum = out[h * dim + d] * rescale[h];
      for (int64_t b = 0; b < count; ++b) sum += weights[h * kBlock + b] * values[b][d];
      out[h * dim + d] = sum;
    }
  }
}

template <int kBytes, typename Acc>
SWARM_KV_INLINE void accumulate_block(const Acc* weights, const Acc* rescale, int64_t heads,
                                      const Acc* const* values, int64_t count, int64_t dim,
                                      Acc* out) {
  int64_t h = 0;
  for (; h + 4 <= heads; h += 4) {
    accumulate_rows<kBytes, 4>(weights + h * kBlock, rescale + h, values, count, dim,
                               out + h * dim);
  }
  weights += h * kBlock;
  rescale += h;
  out += h * dim;
  switch (heads - h) {
    case 3:
      return accumulate_rows<kBytes, 3>(weights, rescale, values, count, dim, out);
    case 2:
      return accumulate_rows<kBytes, 2>(weights, rescale, values, count, dim, out);
    case 1:
      return accumulate_rows<kBytes, 1>(weights, rescale, values, count, dim, out);
    default:
      return;
  }
}

// s -> cap * tanh(s / cap), to an absolute error of about 1e-7 * cap.
template <typename Acc>
SWARM_KV_INLINE void cap_scores(Acc* scores, int64_t count, Acc cap) {
  const Acc factor = Acc(1) / cap;
  for (int64_t b = 0; b < count; ++b) {
    const Acc x = scores[b] * factor;
    const Acc e = exp_nonpositive(Acc(-2) * (x < 0 ? -x : x));
    const Acc magnitude = cap * ((Acc(1) - e) / (Acc(1) + e));
    scores[b] = x < 0 ? -magnitude : magnitude;
  }
}

// Scores become weights exp(score - max), with max and sum carried on from the blocks before;
// returns what they must be scaled by.
template <int kBytes, typename Acc>
SWARM_KV_INLINE Acc weigh_block(Acc* scores, int64_t count, Acc& max, Acc& sum) {
  const Acc block_max = max_of<kBytes>(scores, count, max);
  const Acc shift = finite_shift(block_max);
  exp_below<kBytes>(scores, count, shift, scores);
  const Acc rescale = exp_nonpositive(max - shift);
  sum = sum * rescale + sum_of<kBytes>(scores, count);
  max = block_max;
  return rescale;
}

// Elements of scratch that attend needs.
template <typename T, typename Acc>
int64_t scratch_size(const SparseAttention<T, Acc>& call) {
  const int64_t group = call.query_heads / call.kv_heads;
  return group * kBlock + group + (std::is_same_v<T, Acc> ? 0 : kBlock * call.dim);
}

// Entries lie anywhere in the pool, where the processor foresees nothing: asks for part `part` of
// `parts` of them early, each as a whole, since memory gives neighbouring lines sooner than others.
template <typename T>
SWARM_KV_INLINE void prefetch_entries(const T* pool, const int64_t* slots, int64_t count,
                                      int64_t entry_size, int64_t part, int64_t parts) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t b = count * part / parts; b < count * (part + 1) / parts; ++b) {
    for (int64_t d = 0; d < entry_size; d += kLine) __builtin_prefetch(pool + slots[b] + d, 0, 2);
  }
}

template <int kBytes, typename T, typename Acc>
SWARM_KV_INLINE void attend_by(const SparseAttention<T, Acc>& call, const Chunk& chunk,
                               const Partial<Acc>& partial, Acc* scratch) {
  const int64_t group = call.query_heads / call.kv_heads;
  const int64_t dim = call.dim;
  const int64_t entry_size = 2 * call.kv_heads * dim;
  Acc* scores = scratch;
  Acc* rescale = scores + group * kBlock;
  Acc* wide = rescale + group;
  const Acc* rows[kBlock];

  std::fill_n(partial.out, call.query_heads * dim, Acc(0));
  std::fill_n(partial.max, call.query_heads, -std::numeric_limits<Acc>::infinity());
  std::fill_n(partial.sum, call.query_heads, Acc(0));
  for (int64_t first = chunk.first; first < chunk.last; first += kBlock) {
    const int64_t count = std::min(kBlock, chunk.last - first);
    const int64_t* slots = call.slots + first;
    const int64_t* next = slots + count;
    const int64_t next_count = std::min(kBlock, chunk.ahead - first - count);
    for (int64_t kv = 0; kv < call.kv_heads; ++kv) {
      const int64_t head = kv * group;
      const T* keys = call.pool + kv * dim;
      const T* values = keys + call.kv_heads * dim;
      prefetch_entries(call.pool, next, next_count, entry_size, 2 * kv, 2 * call.kv_heads);
      widen(keys, slots, count, dim, wide, rows);
      const Acc* queries = call.q + (chunk.row * call.query_heads + head) * dim;
      dot_all<kBytes>(queries, group, dim, rows, count, dim, call.scale, scores, kBlock);
      for (int64_t h = 0; h < group; ++h) {
        if (call.softcap != 0) cap_scores(scores + h * kBlock, count, call.softcap);
        rescale[h] = weigh_block<kBytes>(scores + h * kBlock, count, partial.max[head + h],
                                         partial.sum[head + h]);
      }
      prefetch_entries(call.pool, next, next_count, entry_size, 2 * kv + 1, 2 * call.kv_heads);
      widen(values, slots, count, dim, wide, rows);
      accumulate_block<kBytes>(scores, rescale, group, rows, count, dim, partial.out + head * dim);
    }
  }
}

#define SWARM_KV_ATTEND(T, Acc)                                             \
  SWARM_KV_WIDTHS(void, attend,                                             \
                  (const SparseAttention<T, Acc>& call, const Chunk& chunk, \
                   const Partial<Acc>& partial, Acc* scratch),              \
                  (call, chunk, partial, scratch))
SWARM_KV_ATTEND(float, float)
SWARM_KV_ATTEND(fp16, float)
SWARM_KV_ATTEND(bf16, float)
SWARM_KV_ATTEND(double, double)
#undef SWARM_KV_ATTEND

// Adds the partials of one row, then the sink, and normalises into out and lse.
template <typename Acc>
void finish_row(const Partial<Acc>* partials, int64_t count, int64_t heads, int64_t dim,
                const Acc* sinks, Acc* out, Acc* lse) {
  for (int64_t h = 0; h < heads; ++h) {
    Acc max = sinks == nullptr ? -std::numeric_limits<Acc>::infinity() : sinks[h];
    for (int64_t i = 0; i < count; ++i) max = std::max(max, partials[i].max[h]);
    const Acc shift = finite_shift(max);
    Acc sum = sinks == nullptr ? Acc(0) : std::exp(sinks[h] - shift);
    for (int64_t i = 0; i < count; ++i)
      sum += partials[i].sum[h] * std::exp(partials[i].max[h] - shift);
    const Acc inverse = sum == 0 ? Acc(0) : Acc(1) / sum;
    Acc* target = out + h * dim;
    if (count == 0) std::fill_n(target, dim, Acc(0));
    for (int64_t i = 0; i < count; ++i) {
      const Acc weight = inverse * std::exp(partials[i].max[h] - shift);
      const Acc* source = partials[i].out + h * dim;
      for (int64_t d = 0; d < dim; ++d) {
        target[d] = weight * source[d] + (i == 0 ? Acc(0) : target[d]);
      }
    }
    lse[h] = shift + std::log(sum);
  }
}

// Cuts the rows into equal chunks, at most four a thread. chunk_offsets[r] .. [r + 1] are row r's.
std::vector<Chunk> split_rows(const int64_t* row_offsets, int64_t rows, int64_t threads,
                              std::vector<int64_t>& chunk_offsets) {
  const int64_t total = std::max<int64_t>(row_offsets[rows] - row_offsets[0], 1);
  const int64_t pieces = threads == 1 ? 1 : std::clamp<int64_t>(total / kMinChunk, 1, 4 * threads);
  const int64_t length = (total + pieces - 1) / pieces;
  std::vector<Chunk> chunks;
  chunk_offsets.assign(1, 0);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t first = row_offsets[row]; first < row_offsets[row + 1]; first += length) {
      chunks.push_back({row, first, std::min(first + length, row_offsets[row + 1])});
    }
    chunk_offsets.push_back(static_cast<int64_t>(chunks.size()));
  }
  return chunks;
}

template <typename T, typename Acc>
void run(const SparseAttention<T, Acc>& call) {
  std::vector<int64_t> chunk_offsets;
  const std::vector<Chunk> chunks =
      split_rows(call.row_offsets, call.rows, num_threads(), chunk_offsets);
  const int64_t count = static_cast<int64_t>(chunks.size());
  const int64_t row_size = call.query_heads * call.dim;
  // A row that is one chunk accumulates in its output; only rows in several chunks need room for
  // partial outputs.
  int64_t split_chunks = 0;
  for (int64_t row = 0; row < call.rows; ++row) {
    const int64_t own = chunk_offsets[row + 1] - chunk_offsets[row];
    split_chunks += own > 1 ? own : 0;
  }
  const int64_t scratch = scratch_size(call);
  // Kept: a block of this size that is given back makes malloc tidy up at every call.
  static thread_local std::vector<Acc> kept;
  const size_t wanted = split_chunks * row_size + count * (2 * call.query_heads + scratch);
  if (kept.size() < wanted) kept.resize(wanted);
  Acc* next_out = kept.data();
  Acc* next_state = next_out + split_chunks * row_size;
  Acc* scratches = next_state + count * 2 * call.query_heads;
  std::vector<Partial<Acc>> partials;
  partials.reserve(count);
  for (const Chunk& chunk : chunks) {
    const bool alone = chunk_offsets[chunk.row + 1] - chunk_offsets[chunk.row] == 1;
    partials.push_back({alone ? call.out + chunk.row * row_size : next_out, next_state,
                        next_state + call.query_heads});
    if (!alone) next_out += row_size;
    next_state += 2 * call.query_heads;
  }
  parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    const FlushDenormals flush;
    const int64_t ahead = chunks[end - 1].last, first = chunks[begin].first;
    prefetch_entries(call.pool, call.slots + first, std::min(kBlock, ahead - first),
                     2 * call.kv_heads * call.dim, 0, 1);
    for (int64_t i = begin; i < end; ++i) {
      Chunk chunk = chunks[i];
      chunk.ahead = ahead;
      attend(call, chunk, partials[i], scratches + i * scratch);
    }
  });
  for (int64_t row = 0; row < call.rows; ++row) {
    finish_row(partials.data() + chunk_offsets[row], chunk_offsets[row + 1] - chunk_offsets[row],
               call.query_heads, call.dim, call.sinks, call.out + row * row_size,
               call.lse + row * call.query_heads);
  }
}

}  // namespace

void sparse_attention(const SparseAttention<float, float>& call) { run(call); }
void sparse_attention(const SparseAttention<fp16, float>& call) { run(call); }
void sparse_attention(const SparseAttention<bf16, float>& call) { run(call); }
void sparse_attention(const SparseAttention<double, double>& call) { run(call); }

template <typename Acc>
void merge_attention(const Acc* out_a, const Acc* lse_a, const Acc* out_b, const Acc* lse_b,
                     int64_t rows, int64_t dim, Acc* out, Acc* lse) {
  parallel_for(0, rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, dim)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t r = begin; r < end; ++r) {
                   const Acc shift = finite_shift(std::max(lse_a[r], lse_b[r]));
                   const Acc weight_a = std::exp(lse_a[r] - shift);
                   const Acc weight_b = std::exp(lse_b[r] - shift);
                   const Acc sum = weight_a + weight_b;
                   const Acc inverse = sum == 0 ? Acc(0) : Acc(1) / sum;
                   const Acc* a = out_a + r * dim;
                   const Acc* b = out_b + r * dim;
                   for (int64_t d = 0; d < dim; ++d) {
                     out[r * dim + d] = inverse * (weight_a * a[d] + weight_b * b[d]);
                   }
                   lse[r] = shift + std::log(sum);
                 }
               });
}

template void merge_attention<float>(const float*, const float*, const float*, const float*,
                                     int64_t, int64_t, float*, float*);
template void merge_attention<double>(const double*, const double*, const double*, const double*,
                                      int64_t, int64_t, double*, double*);

}  // namespace swarm_kv::cpu
