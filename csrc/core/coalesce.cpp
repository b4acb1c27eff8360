#include "core/coalesce.h"

#include <algorithm>

namespace swarm_kv {

std::vector<double> speeds(const std::vector<DriveShape>& drives, int64_t entry_bytes) {
  std::vector<double> speeds;
  for (const DriveShape& drive : drives) {
    speeds.push_back(1 / drive.model.seconds(1, static_cast<uint64_t>(entry_bytes)));
  }
  return speeds;
}

std::vector<Read> coalesce(std::vector<Piece>& pieces, const std::vector<DriveShape>& drives,
                           uint64_t max_read) {
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return a.drive != b.drive ? a.drive < b.drive : a.offset < b.offset;
  });
  std::vector<std::vector<Read>> per_drive(drives.size());
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    const DriveShape& drive = drives[piece.drive];
    const uint64_t begin = piece.offset / drive.block * drive.block;
    const uint64_t end =
        (piece.offset + piece.length + drive.block - 1) / drive.block * drive.block;
    auto& reads = per_drive[piece.drive];
    if (!reads.empty()) {
      Read& last = reads.back();
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
    reads.push_back({piece.drive, begin, end - begin, static_cast<int32_t>(i), 1});
  }
  std::vector<Read> reads;
  bool more = true;
  for (size_t turn = 0; more; ++turn) {
    more = false;
    for (const auto& queue : per_drive) {
      if (turn < queue.size()) {
        reads.push_back(queue[turn]);
        more = true;
      }
    }
  }
  return reads;
}

}  // namespace swarm_kv
