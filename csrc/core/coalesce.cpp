#include "core/coalesce.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace swarm_kv {

std::vector<double> speeds(const std::vector<DriveShape>& drives, int64_t entry_bytes) {
  std::vector<double> speeds;
  for (const DriveShape& drive : drives) {
    speeds.push_back(1 / drive.model.seconds(1, static_cast<uint64_t>(entry_bytes)));
  }
  return speeds;
}

namespace {

void sort_pieces(std::vector<Piece>& pieces) {
  const auto by_place = [](const Piece& a, const Piece& b) {
    return std::tie(a.drive, a.again, a.offset, a.wanted) <
           std::tie(b.drive, b.again, b.offset, b.wanted);
  };
  std::sort(pieces.begin(), pieces.end(), by_place);
  bool any_again = false;
  for (size_t i = 1; i < pieces.size(); ++i) {
    const Piece& before = pieces[i - 1];
    if (pieces[i].drive != before.drive || pieces[i].offset != before.offset) continue;
    pieces[i].again = before.again + 1;
    any_again = true;
  }
  if (any_again) std::sort(pieces.begin(), pieces.end(), by_place);
}

}  // namespace

void coalesce(std::vector<Piece>& pieces, const std::vector<DriveShape>& drives, uint64_t max_read,
              std::vector<Read>& reads) {
  // Kept by each thread, so that a step as large as the last one allocates nothing.
  static thread_local std::vector<Read> by_drive;
  static thread_local std::vector<std::pair<size_t, size_t>> queues;  // per drive, of by_drive
  static thread_local std::vector<double> busy;  // per drive: seconds for what is in `reads`
  sort_pieces(pieces);
  by_drive.clear();
  queues.assign(drives.size(), {0, 0});
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    const DriveShape& drive = drives[piece.drive];
    const uint64_t begin = piece.offset / drive.block * drive.block;
    const uint64_t end =
        (piece.offset + piece.length + drive.block - 1) / drive.block * drive.block;
    if (i > 0 && pieces[i - 1].drive == piece.drive && pieces[i - 1].again == piece.again) {
      Read& last = by_drive.back();
      const uint64_t last_end = last.offset + last.length;
      const uint64_t gap = begin > last_end ? begin - last_end : 0;
      const bool gap_is_cheaper =
          static_cast<double>(gap) * drive.model.t_transfer <= drive.model.t_base;
      if (gap_is_cheaper && std::max(end, last_end) - last.offset <= max_read) {
        last.length = std::max(end, last_end) - last.offset;
        ++last.count;
        continue;
      }
    }
    auto& [first, last] = queues[piece.drive];
    if (first == last) first = by_drive.size();
    by_drive.push_back({piece.drive, begin, end - begin, static_cast<int32_t>(i), 1});
    last = by_drive.size();
  }
  reads.clear();
  busy.assign(drives.size(), 0.0);
  while (reads.size() < by_drive.size()) {
    size_t first = drives.size();
    for (size_t d = 0; d < drives.size(); ++d) {
      const auto& [next, last] = queues[d];
      if (next < last && (first == drives.size() || busy[d] < busy[first])) first = d;
    }
    const Read& read = by_drive[queues[first].first++];
    busy[first] += drives[first].model.seconds(1, read.length);
    reads.push_back(read);
  }
}

}  // namespace swarm_kv
