#include "ops/cpu/intervals.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "core/simd.h"

namespace swarm_kv::cpu {
namespace {

using Limits = std::numeric_limits<float>;

// Share of the probability that as many entries exceed as are wanted, at which intervals mostly
// meet the budget.
constexpr double kUsualPrice = 0.85;

// Positions from begin on and before end.
struct Span {
  int32_t begin;
  int32_t end;
};

// Positions that join the optimal set together, when lambda falls to `price`.
struct Piece {
  Span span;
  float price;
};

// Bins of numbers that are not negative, in descending order: exponent, and steps of a sixteenth.
constexpr int kBins = 1 << 12;
constexpr int kBitsWithinBin = 19;
int bin_of(float value) {
  return kBins - 1 - static_cast<int>(std::bit_cast<uint32_t>(value + 0.0f) >> kBitsWithinBin);
}
float lower_edge(int bin) {
  return std::bit_cast<float>(static_cast<uint32_t>(kBins - 1 - bin) << kBitsWithinBin);
}

struct Point {
  double x;  // sum of probabilities of the positions before this point
  double y;  // their number, and where in the tube the string passes
  int32_t position;
};

// Positive where the way a -> b -> c turns left.
double turn(const Point& a, const Point& b, const Point& c) {
  return (b.x - a.x) * (c.y - b.y) - (b.y - a.y) * (c.x - b.x);
}

// One side of the funnel: from the last point that the string is known to pass, the shortest path
// along the upper (kSide 1: it only turns left) or the lower (kSide -1: right) border of the tube.
template <int kSide>
class Border {
 public:
  // Room for `points` of them.
  void reserve(size_t points) { points_.resize(std::max(points_.size(), points)); }
  void restart(const Point& apex) {
    points_[0] = apex;
    first_ = last_ = 0;
  }
  const Point& apex() const { return points_[first_]; }
  const Point& next() const { return points_[first_ + 1]; }
  bool bare() const { return first_ == last_; }
  void advance() { ++first_; }

  // Lays the border on to `point`; `other` is the opposite one. Where it cuts across that one, the
  // string is known up to where it does: calls emit(from, to) for each straight part of it.
  template <typename Emit>
  void extend(const Point& point, Border<-kSide>& other, const Emit& emit) {
    while (!bare() && kSide * turn(points_[last_ - 1], points_[last_], point) <= 0) --last_;
    if (bare() && other.is_crossed_by(point)) {
      do {
        emit(other.apex(), other.next());
        other.advance();
      } while (other.is_crossed_by(point));
      restart(other.apex());
    }
    points_[++last_] = point;
  }

  // Whether a straight way from the apex to `point`, on the opposite border, leaves this one.
  bool is_crossed_by(const Point& point) const {
    return !bare() && kSide * turn(apex(), next(), point) >= 0;
  }

 private:
  std::vector<Point> points_;  // first_ to last_ are in use
  size_t first_ = 0;           // the apex; points before it are done with
  size_t last_ = 0;
};

// The pieces of all spans that it is given, in their order.
class TautString {
 public:
  // gains: what each position brings, positive.
  void restart(const std::vector<float>& gains, double request_cost) {
    gains_ = &gains;
    half_ = request_cost / 2;
    upper_.reserve(gains.size() + 2);
    lower_.reserve(gains.size() + 2);
    pieces_.clear();
  }

  // Solves for the positions of `span` where none around it are ever taken, which fixes the ends.
  void solve(const Span& span) {
    upper_.restart({0.0, span.begin - half_, span.begin});
    lower_.restart(upper_.apex());
    const auto emit = [this](const Point& from, const Point& to) { add_piece(from, to); };
    const float* const gains = gains_->data();
    double sum = gains[span.begin];
    for (int32_t i = span.begin + 1; i < span.end; ++i) {
      upper_.extend({sum, i + half_, i}, lower_, emit);
      lower_.extend({sum, i - half_, i}, upper_, emit);
      sum += gains[i];
    }
    const Point end{sum, span.end + half_, span.end};
    upper_.extend(end, lower_, emit);
    lower_.extend(end, upper_, emit);
    for (; !lower_.bare() && lower_.apex().position < span.end; lower_.advance()) {
      add_piece(lower_.apex(), lower_.next());
    }
  }

  std::vector<Piece>& pieces() { return pieces_; }

 private:
  void add_piece(const Point& from, const Point& to) {
    const double rise = to.y - from.y;  // positive but for rounding
    const double price = rise > 0 ? (to.x - from.x) / rise : Limits::max();
    pieces_.push_back(
        {{from.position, to.position}, static_cast<float>(std::min(price, double{Limits::max()}))});
  }

  const std::vector<float>* gains_ = nullptr;
  double half_ = 0;
  Border<1> upper_;
  Border<-1> lower_;
  std::vector<Piece> pieces_;
};

// Kept by each thread: a call as large as the last one asks for no memory but its result's.
struct Scratch {
  std::vector<uint8_t> seen, taken;  // per entry
  std::vector<float> gains;          // per position
  std::vector<double> sums;          // of the gains before each
  std::vector<int32_t> strong;
  std::vector<uint8_t> ways;
  std::vector<Span> spans;
  TautString string;
  std::vector<int32_t> order;  // of pieces
};

// Not inlined: knowing where it is, GCC would look that up at each use, which takes a call.
__attribute__((noinline)) Scratch& own_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

// The optimal set at one price, in ascending order. An interval begins and ends at positions that
// bring more than the price and takes whole gaps between them, so these "strong" ones are all there
// is to look at: the best sum so far that ends inside an interval, relative to the best that ends
// outside, and then the way back.
void optimal_spans(double price, double request_cost, Scratch& scratch) {
  const int32_t count = static_cast<int32_t>(scratch.gains.size());
  const float* const gains = scratch.gains.data();
  const double* const sums = scratch.sums.data();
  // Without branches on what cannot be foreseen, here and below: each place is written until it
  // holds what it is for.
  scratch.strong.resize(count + 1);
  int32_t* const strong = scratch.strong.data();
  int32_t found = 0;
  for (int32_t i = 0; i < count; ++i) {
    strong[found] = i;
    found += gains[i] > price;
  }
  scratch.ways.resize(found);
  uint8_t* const ways = scratch.ways.data();  // bit 0: an interval may end here, 1: or come here
  const double start = -price * request_cost;
  double lead = -std::numeric_limits<double>::infinity();
  int32_t previous = 0;
  for (int32_t s = 0; s < found; ++s) {
    const int32_t i = strong[s];
    const double across = lead + (sums[i] - sums[previous]) - price * (i - previous);
    lead = (across > start ? across : start) + (gains[i] - price);
    ways[s] = static_cast<uint8_t>((lead > 0) | (across > start) << 1);
    lead = lead < 0 ? lead : 0;
    previous = i + 1;
  }
  std::vector<Span>& spans = scratch.spans;
  spans.resize(found + 1);
  size_t taken = 0;
  int inside = 0;
  int32_t end = 0;
  for (int32_t s = found - 1; s >= 0; --s) {
    const int32_t i = strong[s];
    end = inside ? end : i + 1;
    inside |= ways[s] & 1;
    spans[taken] = {i, end};
    const int goes_on = ways[s] >> 1;
    taken += inside & ~goes_on;
    inside &= goes_on;
  }
  spans.resize(taken);
  std::reverse(spans.begin(), spans.end());
}

// Where requests cost nothing every position stands for itself.
void single_positions(const float* probs, const int32_t* members, int64_t count,
                      std::vector<Piece>& pieces) {
  pieces.resize(count);
  for (int64_t i = 0; i < count; ++i) {
    pieces[i] = {{static_cast<int32_t>(i), static_cast<int32_t>(i + 1)}, probs[members[i]]};
  }
}

double sum_of(const float* values, int64_t count) {
  constexpr int kSums = 4;  // at a time: one alone would wait for every addition
  double sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (int s = 0; s < kSums; ++s) sums[s] += values[i + s];
  }
  return std::accumulate(values + i, values + count, sums[0] + sums[1] + sums[2] + sums[3]);
}

// Distinct entries of the spans. `seen`, 1 for all of them, counts each once.
int64_t entries_within(const std::vector<Span>& spans, const int32_t* members, uint8_t* seen) {
  int64_t count = 0;
  for (const Span& span : spans) {
    for (int32_t i = span.begin; i < span.end; ++i) {
      count += seen[members[i]];
      seen[members[i]] = 0;
    }
  }
  return count;
}

// The pieces that may be needed. A copy of an entry that lies further ahead already brings nothing.
// A millionth of the mean is added everywhere, so that every position brings something.
void find_pieces(const float* probs, int64_t entries, const int32_t* members, int64_t count,
                 int64_t budget, double request_cost, Scratch& scratch) {
  const double total = sum_of(probs, entries);
  const float least =
      std::max(static_cast<float>(1e-6 * total / static_cast<double>(entries)), Limits::min());
  scratch.seen.assign(entries, 0);
  scratch.gains.resize(count);
  uint8_t* const seen = scratch.seen.data();  // writing bytes, the compiler trusts locals alone
  float* const gains = scratch.gains.data();
  scratch.sums.resize(count);
  double* const sums = scratch.sums.data();
  double sum = 0;
  std::array<int32_t, kBins> strongest{};
  for (int64_t i = 0; i < count; ++i) {
    uint8_t& known = seen[members[i]];
    gains[i] = std::min((known != 0 ? 0.0f : probs[members[i]]) + least, Limits::max());
    sums[i] = sum;
    sum += gains[i];
    strongest[bin_of(gains[i])] += known == 0;
    known = 1;
  }
  // At the lower of these prices each of the `budget` strongest entries is worth an interval of its
  // own, so the budget is met at it or above, and what the optimal set leaves out there never
  // matters. Mostly it is met at the other one too, which leaves out far more.
  int bin = 0;
  for (int64_t held = 0; bin < kBins && (held += strongest[bin]) < budget;) ++bin;
  const double strong = bin < kBins ? 0.999 * lower_edge(bin) : 0.0;
  optimal_spans(kUsualPrice * strong, request_cost, scratch);
  if (entries_within(scratch.spans, members, seen) < budget) {
    optimal_spans(strong / (1 + request_cost), request_cost, scratch);
  }
  scratch.string.restart(scratch.gains, request_cost);
  for (const Span& span : scratch.spans) scratch.string.solve(span);
}

// Indices of pieces by bins of descending price; only within a bin they still stand by position.
class PriceBins {
 public:
  PriceBins(const std::vector<Piece>& pieces, std::vector<int32_t>& order) : order_(order) {
    order_.resize(pieces.size());
    for (const Piece& piece : pieces) ++ends_[bin_of(piece.price)];
    std::partial_sum(ends_.begin(), ends_.end(), ends_.begin());
    std::array<int32_t, kBins> next;
    next[0] = 0;
    std::copy(ends_.begin(), ends_.end() - 1, next.begin() + 1);
    for (size_t p = 0; p < pieces.size(); ++p) {
      order_[next[bin_of(pieces[p].price)]++] = static_cast<int32_t>(p);
    }
  }
  int32_t* begin(int bin) { return order_.data() + (bin == 0 ? 0 : ends_[bin - 1]); }
  int32_t* end(int bin) { return order_.data() + ends_[bin]; }

 private:
  std::vector<int32_t>& order_;
  std::array<int32_t, kBins> ends_{};
};

// Entries taken so far.
class Taken {
 public:
  Taken(const float* probs, int64_t entries, const int32_t* members, int64_t budget,
        std::vector<uint8_t>& room)
      : probs_(probs), members_(members), entries_(entries), left_(budget) {
    room.assign(entries, 0);
    taken_ = room.data();
  }

  int64_t left() const { return left_; }

  void take(const Span& span) {
    int64_t fresh = 0;
    for (int32_t i = span.begin; i < span.end; ++i) {
      uint8_t& taken = taken_[members_[i]];
      fresh += taken == 0;
      taken = 1;
    }
    left_ -= fresh;
  }

  // As much of the span as is left to take: neighbours, those with the greatest sum of
  // probabilities (ties: lower position).
  void take_within_budget(const Span& span) {
    std::vector<int32_t> fresh;
    for (int32_t i = span.begin; i < span.end; ++i) {
      uint8_t& taken = taken_[members_[i]];
      if (taken == 0) fresh.push_back(members_[i]);
      taken = 1;
    }
    const int64_t found = static_cast<int64_t>(fresh.size());
    const int64_t wanted = std::min(left_, found);
    double gain = 0, best_gain = 0;
    int64_t best = 0;
    for (int64_t first = 1; first + wanted <= found; ++first) {
      gain += static_cast<double>(probs_[fresh[first + wanted - 1]]) - probs_[fresh[first - 1]];
      if (gain > best_gain) best_gain = gain, best = first;
    }
    for (int64_t i = 0; i < found; ++i) taken_[fresh[i]] = i >= best && i < best + wanted;
    left_ -= wanted;
  }

  std::vector<int64_t> ids() const {
    // Without a branch on what cannot be foreseen; one place more, which what is not taken fills.
    std::vector<int64_t> result(std::count(taken_, taken_ + entries_, 1) + 1);
    size_t found = 0;
    for (int64_t entry = 0; entry < entries_; ++entry) {
      result[found] = entry;
      found += taken_[entry];
    }
    result.pop_back();
    return result;
  }

 private:
  const float* probs_;
  const int32_t* members_;
  int64_t entries_;
  uint8_t* taken_;  // per entry
  int64_t left_;
};

}  // namespace

// Then their bits compare as they do; compilers do not vectorise the plain comparison of floats.
SWARM_KV_CLONES bool all_amounts(const float* values, int64_t count) {
  uint32_t greatest = 0;
  for (int64_t i = 0; i < count; ++i) {
    greatest = std::max(greatest, std::bit_cast<uint32_t>(values[i] + 0.0f));  // -0 becomes 0
  }
  return greatest < std::bit_cast<uint32_t>(Limits::infinity());
}

std::vector<int64_t> select_intervals(const float* probs, int64_t entries, const int32_t* members,
                                      int64_t count, int64_t budget, double request_cost) {
  Scratch& scratch = own_scratch();
  Taken taken(probs, entries, members, std::min(budget, entries), scratch.taken);
  if (budget == 0 || count == 0) return taken.ids();
  if (budget >= entries) {
    taken.take({0, static_cast<int32_t>(count)});
    return taken.ids();
  }
  std::vector<Piece>& pieces = scratch.string.pieces();
  if (request_cost > 0) {
    find_pieces(probs, entries, members, count, budget, request_cost, scratch);
  } else {
    single_positions(probs, members, count, pieces);
  }
  PriceBins bins(pieces, scratch.order);
  for (int bin = 0; bin < kBins && taken.left() > 0; ++bin) {
    int32_t *const begin = bins.begin(bin), *const end = bins.end(bin);
    int64_t positions = 0;
    for (const int32_t* p = begin; p != end; ++p) {
      positions += pieces[*p].span.end - pieces[*p].span.begin;
    }
    if (positions <= taken.left()) {
      std::for_each(begin, end, [&](int32_t p) { taken.take(pieces[p].span); });
      continue;
    }
    std::sort(begin, end, [&](int32_t a, int32_t b) {
      return pieces[a].price != pieces[b].price ? pieces[a].price > pieces[b].price : a < b;
    });
    for (const int32_t* p = begin; p != end && taken.left() > 0; ++p) {
      taken.take_within_budget(pieces[*p].span);
    }
  }
  return taken.ids();
}

}  // namespace swarm_kv::cpu
