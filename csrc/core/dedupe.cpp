#include "core/dedupe.h"

#include <algorithm>
#include <string>

#include "io/error.h"

namespace swarm_kv {
namespace {

constexpr size_t kMostRows = 65535;  // and segments: each is two bytes of Demand::key
constexpr int32_t kAlone = -1;       // the position of an entry that was selected by itself

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

void check_count(size_t count, const char* what) {
  if (count <= kMostRows) return;
  throw Error(ErrorKind::kArgument, "a fetch takes at most " + std::to_string(kMostRows) + " " +
                                        what + ", got " + std::to_string(count) +
                                        ": divide the batch");
}

// How many entries, and how many clusters, come before each of a row's segments.
struct Bases {
  std::vector<int64_t> entries{0};
  std::vector<int64_t> clusters{0};

  Bases(std::span<Segment* const> segments, const Selection& row) {
    for (size_t i = 0; i < row.segments.size(); ++i) {
      if (std::find(row.segments.begin(), row.segments.begin() + i, row.segments[i]) !=
          row.segments.begin() + i) {
        throw Error(ErrorKind::kArgument, "a row of a fetch names segment " +
                                              std::to_string(segments[row.segments[i]]->id) +
                                              " twice");
      }
      const Segment& segment = *segments[row.segments[i]];
      entries.push_back(entries.back() + segment.entries);
      clusters.push_back(clusters.back() + segment.clusters.count());
    }
  }
};

// Index of the segment that holds `number`, which is in range.
size_t holder(const std::vector<int64_t>& bases, int64_t number) {
  return std::upper_bound(bases.begin(), bases.end(), number) - bases.begin() - 1;
}

void collect(std::span<Segment* const> segments, const Selection& row, int32_t number,
             const Bases& bases, std::vector<Demand>& demands) {
  const auto demand = [&](int32_t segment, int64_t entry, int64_t position) {
    demands.push_back({static_cast<uint64_t>(segment) << 48 | static_cast<uint64_t>(entry) << 16 |
                           static_cast<uint64_t>(number),
                       static_cast<int32_t>(position)});
  };
  for (const int64_t cluster : row.clusters) {
    if (cluster < 0 || cluster >= bases.clusters.back()) {
      throw Error(ErrorKind::kArgument, "cluster " + std::to_string(cluster) +
                                            " does not exist in this layer's segments");
    }
    const size_t i = holder(bases.clusters, cluster);
    const Clusters& clusters = segments[row.segments[i]]->clusters;
    const int64_t local = cluster - bases.clusters[i];
    for (int64_t at = clusters.offsets[local]; at < clusters.offsets[local + 1]; ++at) {
      if (bases.entries[i] + clusters.members[at] >= row.limit) continue;
      demand(row.segments[i], clusters.members[at], at);
    }
  }
  for (const int64_t id : row.entries) {
    if (id < 0 || id >= bases.entries.back()) {
      throw Error(ErrorKind::kArgument, "entry " + std::to_string(id) + " is outside [0, " +
                                            std::to_string(bases.entries.back()) + ")");
    }
    if (id >= row.limit) continue;
    const size_t i = holder(bases.entries, id);
    demand(row.segments[i], id - bases.entries[i], kAlone);
  }
}

}  // namespace

WantedList dedupe(std::span<Segment* const> segments, std::span<const Selection> rows) {
  check_count(rows.size(), "rows");
  check_count(segments.size(), "segments");
  std::vector<Demand> demands;
  std::vector<Bases> bases;
  for (size_t row = 0; row < rows.size(); ++row) {
    bases.emplace_back(segments, rows[row]);
    collect(segments, rows[row], static_cast<int32_t>(row), bases.back(), demands);
  }
  std::sort(demands.begin(), demands.end());

  WantedList wanted;
  wanted.entries.reserve(demands.size());
  wanted.candidates.reserve(demands.size());
  wanted.takers.reserve(demands.size());
  for (size_t begin = 0, end = 0; begin < demands.size(); begin = end) {
    const Demand& first = demands[begin];
    const Segment& segment = *segments[first.segment()];
    const auto first_candidate = static_cast<int32_t>(wanted.candidates.size());
    const auto first_taker = static_cast<int32_t>(wanted.takers.size());
    for (; end < demands.size() && demands[end].same_entry(first); ++end) {
      const Demand& demand = demands[end];
      if (end == begin || demand.row() != demands[end - 1].row()) {
        const Selection& row = rows[demand.row()];
        const size_t i = std::find(row.segments.begin(), row.segments.end(), demand.segment()) -
                         row.segments.begin();
        wanted.takers.push_back({demand.row(), bases[demand.row()].entries[i] + demand.entry()});
      }
      // Clusters that were named twice, or by several rows, bring the same copy again.
      const auto known = std::find_if(
          wanted.candidates.begin() + first_candidate, wanted.candidates.end(),
          [&](const Candidate& candidate) { return candidate.position == demand.position; });
      if (demand.position == kAlone || known != wanted.candidates.end()) continue;
      wanted.candidates.push_back({demand.position, group_of(segment.clusters, demand.position)});
    }
    if (static_cast<int32_t>(wanted.candidates.size()) == first_candidate) {
      for (const int32_t position : segment.routing.copies_of(first.entry())) {
        wanted.candidates.push_back({position, group_of(segment.clusters, position)});
      }
    }
    wanted.entries.push_back({first.segment(), first.entry(), first_candidate,
                              static_cast<int32_t>(wanted.candidates.size()) - first_candidate,
                              first_taker,
                              static_cast<int32_t>(wanted.takers.size()) - first_taker});
  }
  return wanted;
}

}  // namespace swarm_kv
