#include "core/dedupe.h"

#include <algorithm>
#include <string>

#include "io/error.h"

namespace swarm_kv {
namespace {

constexpr size_t kMostRows = 65535;             // and segments: each is two bytes of Demand::key
constexpr int32_t kAlone = Wanted::kFirstCopy;  // the position of an entry selected by itself

// One mention of an entry: by a cluster of a row, or by itself.
struct Demand {
  uint64_t key;  // segment, entry, row: two, four and two bytes
  int32_t position;

  int32_t segment() const { return static_cast<int32_t>(key >> 48); }
  int32_t entry() const { return static_cast<int32_t>(key >> 16); }
  int32_t row() const { return static_cast<int32_t>(key & 0xffff); }
  bool same_entry(const Demand& other) const { return key >> 16 == other.key >> 16; }
  auto operator<=>(const Demand&) const = default;
};

// How many entries, and how many clusters, come before each segment of a row.
struct Base {
  int64_t entries;
  int64_t clusters;
};

// Kept by each thread, so that a step as large as the last one allocates nothing.
struct Scratch {
  std::vector<Demand> demands;
  std::vector<Base> bases;         // rows one after another, each with its totals at the end
  std::vector<size_t> first_base;  // per row
};

void check_count(size_t count, const char* what) {
  if (count <= kMostRows) return;
  throw Error(ErrorKind::kArgument, "a fetch takes at most " + std::to_string(kMostRows) + " " +
                                        what + ", got " + std::to_string(count) +
                                        ": divide the batch");
}

std::span<const Base> add_bases(std::span<Segment* const> segments, const Selection& row,
                                Scratch& scratch) {
  const size_t first = scratch.bases.size();
  scratch.first_base.push_back(first);
  Base base{0, 0};
  for (size_t i = 0; i < row.segments.size(); ++i) {
    const auto before = row.segments.first(i);
    const Segment& segment = *segments[row.segments[i]];
    if (std::find(before.begin(), before.end(), row.segments[i]) != before.end()) {
      throw Error(ErrorKind::kArgument,
                  "a row of a fetch names segment " + std::to_string(segment.id) + " twice");
    }
    scratch.bases.push_back(base);
    base.entries += segment.entries;
    base.clusters += segment.clusters.count();
  }
  scratch.bases.push_back(base);
  return std::span(scratch.bases).subspan(first);
}

// Index of the row's segment that holds `number`, which is in range.
size_t holder(std::span<const Base> bases, int64_t Base::* kind, int64_t number) {
  size_t i = 0;
  while (number >= bases[i + 1].*kind) ++i;
  return i;
}

void collect(std::span<Segment* const> segments, const Selection& row, uint64_t number,
             std::span<const Base> bases, std::vector<Demand>& demands) {
  const auto key = [number](int32_t segment, int64_t entry) {
    return static_cast<uint64_t>(segment) << 48 | static_cast<uint64_t>(entry) << 16 | number;
  };
  if (row.limit < 0) {
    throw Error(ErrorKind::kArgument, "the limit of row " + std::to_string(number) + ", " +
                                          std::to_string(row.limit) + ", is below 0");
  }
  for (const int64_t cluster : row.clusters) {
    if (cluster < 0 || cluster >= bases.back().clusters) {
      throw Error(ErrorKind::kArgument, "cluster " + std::to_string(cluster) +
                                            " does not exist in this layer's segments");
    }
    const size_t i = holder(bases, &Base::clusters, cluster);
    const Clusters& clusters = segments[row.segments[i]]->clusters;
    const auto local = static_cast<int32_t>(cluster - bases[i].clusters);
    const int64_t limit = row.limit - bases[i].entries;
    for (int32_t at = clusters.offsets[local]; at < clusters.offsets[local + 1]; ++at) {
      if (clusters.members[at] >= limit) continue;
      demands.push_back({key(row.segments[i], clusters.members[at]), at});
    }
  }
  for (const int64_t id : row.entries) {
    if (id < 0 || id >= bases.back().entries) {
      throw Error(ErrorKind::kArgument, "entry " + std::to_string(id) + " is outside [0, " +
                                            std::to_string(bases.back().entries) + ")");
    }
    if (id >= row.limit) continue;
    const size_t i = holder(bases, &Base::entries, id);
    demands.push_back({key(row.segments[i], id - bases[i].entries), kAlone});
  }
}

// The copy that `demand`, one of `same` of its entry, is read at.
int32_t position_of(std::span<const Demand> same, const Demand& demand) {
  if (demand.position != kAlone) return demand.position;
  for (const Demand& other : same) {
    if (other.position != kAlone) return other.position;
  }
  return kAlone;
}

}  // namespace

void dedupe(std::span<Segment* const> segments, std::span<const Selection> rows, bool unite,
            WantedList& wanted) {
  static thread_local Scratch scratch;
  auto& [demands, bases, first_base] = scratch;
  demands.clear();
  bases.clear();
  first_base.clear();
  check_count(rows.size(), "rows");
  check_count(segments.size(), "segments");
  for (size_t row = 0; row < rows.size(); ++row) {
    collect(segments, rows[row], row, add_bases(segments, rows[row], scratch), demands);
  }
  // One row's single entries come ascending, as selectors give them.
  if (!std::is_sorted(demands.begin(), demands.end())) std::sort(demands.begin(), demands.end());
  demands.erase(std::unique(demands.begin(), demands.end()), demands.end());

  auto& [entries, takers] = wanted;
  entries.clear();
  takers.clear();
  for (size_t begin = 0, end = 0; begin < demands.size(); begin = end) {
    const Demand& first = demands[begin];
    const auto first_taker = static_cast<int32_t>(takers.size());
    for (; end < demands.size() && demands[end].same_entry(first); ++end) {
      const int32_t row = demands[end].row();
      if (end > begin && row == demands[end - 1].row()) continue;
      const auto& own = rows[row].segments;
      const auto i = std::find(own.begin(), own.end(), first.segment()) - own.begin();
      takers.push_back({row, bases[first_base[row] + i].entries + first.entry()});
    }
    const std::span<const Demand> same(&first, end - begin);
    for (const Demand& demand : unite ? same.first(1) : same) {
      const bool repeat = &demand != &first;
      entries.push_back({.segment = first.segment(),
                         .entry = first.entry(),
                         .position = position_of(same, demand),
                         .first_taker = first_taker,
                         .takers = repeat ? 0 : static_cast<int32_t>(takers.size()) - first_taker,
                         .repeat = repeat});
    }
  }
}

}  // namespace swarm_kv
