#pragma once

#include <cstdint>
#include <vector>

#include "io/device_model.h"

namespace swarm_kv {

// One entry's bytes on one drive, and who wants them.
struct Piece {
  int32_t drive;
  uint64_t offset;
  uint64_t length;
  int32_t wanted;     // index into WantedList::entries
  int32_t again = 0;  // set by coalesce(): how many pieces before this one are the same bytes
};

// One request: whole blocks that hold pieces [first, first + count) of the sorted piece list.
struct Read {
  int32_t drive;
  uint64_t offset;
  uint64_t length;
  int32_t first;
  int32_t count;
};

struct DriveShape {
  io::DeviceModel model;
  uint32_t block = 512;  // bytes: requests begin and end on its multiples
};

// Entries per second that each drive serves when they are read one by one.
std::vector<double> speeds(const std::vector<DriveShape>& drives, int64_t entry_bytes);

// Sorts `pieces` by drive and offset, what is read again behind the rest, and fills `reads`:
// neighbours are joined into one request where reading the gap between them costs no more seconds
// than a further request would, up to `max_read` bytes. Requests of the drives alternate by the
// time that they take, so that all drives start at once and, wherever a round ends, are done
// together.
void coalesce(std::vector<Piece>& pieces, const std::vector<DriveShape>& drives, uint64_t max_read,
              std::vector<Read>& reads);

}  // namespace swarm_kv
