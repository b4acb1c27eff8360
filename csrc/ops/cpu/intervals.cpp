#include "ops/cpu/intervals.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <numeric>
#include <utility>

namespace swarm_kv::cpu {
namespace {

using Limits = std::numeric_limits<float>;

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
  void restart(const Point& apex) {
    points_.clear();
    points_.push_back(apex);
    first_ = 0;
  }
  const Point& apex() const { return points_[first_]; }
  const Point& next() const { return points_[first_ + 1]; }
  bool bare() const { return first_ + 1 == points_.size(); }
  void advance() { ++first_; }

  // Lays the border on to `point`; `other` is the opposite one. Where it cuts across that one, the
  // string is known up to where it does: calls emit(from, to) for each straight part of it.
  template <typename Emit>
  void extend(const Point& point, Border<-kSide>& other, const Emit& emit) {
    while (!bare() && kSide * turn(points_.end()[-2], points_.back(), point) <= 0) {
      points_.pop_back();
    }
    if (bare() && other.is_crossed_by(point)) {
      do {
        emit(other.apex(), other.next());
        other.advance();
      } while (other.is_crossed_by(point));
      restart(other.apex());
    }
    points_.push_back(point);
  }

  // Whether a straight way from the apex to `point`, on the opposite border, leaves this one.
  bool is_crossed_by(const Point& point) const {
    return !bare() && kSide * turn(apex(), next(), point) >= 0;
  }

 private:
  std::vector<Point> points_;
  size_t first_ = 0;  // the apex; points before it are done with
};

// The pieces of all spans that it is given, in their order.
class TautString {
 public:
  // gains: what each position brings, positive.
  TautString(const std::vector<float>& gains, double request_cost)
      : gains_(gains), half_(request_cost / 2) {}

  // Solves for the positions of `span` where none around it are ever taken, which fixes the ends.
  void solve(const Span& span) {
    upper_.restart({0.0, span.begin - half_, span.begin});
    lower_.restart(upper_.apex());
    const auto emit = [this](const Point& from, const Point& to) { add_piece(from, to); };
    double sum = gains_[span.begin];
    for (int32_t i = span.begin + 1; i < span.end; ++i) {
      upper_.extend({sum, i + half_, i}, lower_, emit);
      lower_.extend({sum, i - half_, i}, upper_, emit);
      sum += gains_[i];
    }
    const Point end{sum, span.end + half_, span.end};
    upper_.extend(end, lower_, emit);
    lower_.extend(end, upper_, emit);
    for (; !lower_.bare() && lower_.apex().position < span.end; lower_.advance()) {
      add_piece(lower_.apex(), lower_.next());
    }
  }

  std::vector<Piece> take_pieces() { return std::move(pieces_); }

 private:
  void add_piece(const Point& from, const Point& to) {
    const double rise = to.y - from.y;  // positive but for rounding
    const double price = rise > 0 ? (to.x - from.x) / rise : Limits::max();
    pieces_.push_back(
        {{from.position, to.position}, static_cast<float>(std::min(price, double{Limits::max()}))});
  }

  const std::vector<float>& gains_;
  double half_;
  Border<1> upper_;
  Border<-1> lower_;
  std::vector<Piece> pieces_;
};

// The optimal set at one price, in ascending order: the best sum of positions so far that ends
// inside an interval, relative to the best that ends outside, and then the way back.
std::vector<Span> optimal_spans(const std::vector<float>& gains, double price,
                                double request_cost) {
  const int32_t count = static_cast<int32_t>(gains.size());
  const double opening = -price * request_cost;
  std::vector<uint8_t> came_from_inside(count);  // bit 0: to outside, bit 1: to inside
  double lead = opening;
  for (int32_t i = 0; i < count; ++i) {
    came_from_inside[i] = static_cast<uint8_t>((lead > 0) | (lead > opening) << 1);
    lead = std::clamp(lead, opening, 0.0) + (gains[i] - price);
  }
  std::vector<Span> spans;
  bool inside = lead > 0;
  int32_t end = count;
  for (int32_t i = count - 1; i >= 0; --i) {
    const bool before = (came_from_inside[i] >> inside & 1) != 0;
    if (inside && !before) spans.push_back({i, end});
    if (!inside && before) end = i;
    inside = before;
  }
  std::reverse(spans.begin(), spans.end());
  return spans;
}

// Where requests cost nothing every position stands for itself.
std::vector<Piece> single_positions(const float* probs, const int32_t* members, int64_t count) {
  std::vector<Piece> pieces(count);
  for (int64_t i = 0; i < count; ++i) {
    pieces[i] = {{static_cast<int32_t>(i), static_cast<int32_t>(i + 1)}, probs[members[i]]};
  }
  return pieces;
}

// The pieces that may be needed. A copy of an entry that lies further ahead already brings nothing.
// A millionth of the mean is added everywhere, so that every position brings something.
std::vector<Piece> pieces_of(const float* probs, int64_t entries, const int32_t* members,
                             int64_t count, int64_t budget, double request_cost) {
  const double total = std::accumulate(probs, probs + entries, 0.0);
  const float least =
      std::max(static_cast<float>(1e-6 * total / static_cast<double>(entries)), Limits::min());
  std::vector<uint8_t> seen(entries, 0);
  std::vector<float> gains(count);
  std::array<int32_t, kBins> strongest{};
  for (int64_t i = 0; i < count; ++i) {
    uint8_t& known = seen[members[i]];
    gains[i] = std::min((known != 0 ? 0.0f : probs[members[i]]) + least, Limits::max());
    strongest[bin_of(gains[i])] += known == 0;
    known = 1;
  }
  TautString string(gains, request_cost);
  // At this price each of the `budget` strongest entries is worth an interval of its own, so the
  // budget is met at it or above, and what the optimal set leaves out there never matters.
  int bin = 0;
  for (int64_t held = 0; bin < kBins && (held += strongest[bin]) < budget;) ++bin;
  const double price = bin < kBins ? 0.999 * lower_edge(bin) / (1 + request_cost) : 0.0;
  for (const Span& span : optimal_spans(gains, price, request_cost)) string.solve(span);
  return string.take_pieces();
}

// Indices of pieces by bins of descending price; only within a bin they still stand by position.
class PriceBins {
 public:
  explicit PriceBins(const std::vector<Piece>& pieces) : order_(pieces.size()) {
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
  std::vector<int32_t> order_;
  std::array<int32_t, kBins> ends_{};
};

// Entries taken so far.
class Taken {
 public:
  Taken(const float* probs, int64_t entries, const int32_t* members, int64_t budget)
      : probs_(probs), members_(members), taken_(entries, 0), left_(budget) {}

  int64_t left() const { return left_; }

  void take(const Span& span) {
    for (int32_t i = span.begin; i < span.end; ++i) {
      uint8_t& taken = taken_[members_[i]];
      left_ -= taken == 0;
      taken = 1;
    }
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
    std::vector<int64_t> result;
    for (size_t entry = 0; entry < taken_.size(); ++entry) {
      if (taken_[entry] != 0) result.push_back(static_cast<int64_t>(entry));
    }
    return result;
  }

 private:
  const float* probs_;
  const int32_t* members_;
  std::vector<uint8_t> taken_;
  int64_t left_;
};

}  // namespace

std::vector<int64_t> select_intervals(const float* probs, int64_t entries, const int32_t* members,
                                      int64_t count, int64_t budget, double request_cost) {
  Taken taken(probs, entries, members, std::min(budget, entries));
  if (budget == 0 || count == 0) return taken.ids();
  if (budget >= entries) {
    taken.take({0, static_cast<int32_t>(count)});
    return taken.ids();
  }
  const std::vector<Piece> pieces =
      request_cost > 0 ? pieces_of(probs, entries, members, count, budget, request_cost)
                       : single_positions(probs, members, count);
  PriceBins bins(pieces);
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
