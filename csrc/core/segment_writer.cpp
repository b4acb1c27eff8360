#include "core/segment_writer.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "io/error.h"

namespace swarm_kv {
namespace {

constexpr uint64_t kSmallestBuffer = Arena::kGranule;
constexpr uint64_t kLargestBuffer = 1 << 20;

// Two buffers of one drive: one is filled while the other is written.
class DriveWriter {
 public:
  DriveWriter(io::BlockDevice& drive, Arena& arena, std::shared_ptr<Region> region,
              uint64_t buffer_bytes, uint64_t offset)
      : drive_(drive), arena_(arena), region_(std::move(region)), next_offset_(offset) {
    for (Half& half : halves_) {
      half.capacity = buffer_bytes;
      const auto begin = arena_.allocate(buffer_bytes);
      if (!begin) {
        release();
        throw Error(ErrorKind::kCapacity,
                    "the staging memory for writes (" + std::to_string(arena.size()) +
                        " bytes) is held by writes that never ended: open another store");
      }
      half.arena_offset = *begin;
      half.held = true;
      half.data = region_->data() + *begin;
    }
  }

  ~DriveWriter() { release(); }

  void append(const std::byte* data, uint64_t bytes) {
    while (bytes > 0) {
      Half& half = halves_[active_];
      const uint64_t part = std::min(bytes, half.capacity - half.used);
      std::memcpy(half.data + half.used, data, part);
      half.used += part;
      data += part;
      bytes -= part;
      if (half.used == half.capacity) turn();
    }
  }

  void finish() {
    if (halves_[active_].used > 0) turn();
    for (Half& half : halves_) settle(half);
  }

 private:
  struct Half {
    std::byte* data = nullptr;
    uint64_t arena_offset = 0;
    uint64_t capacity = 0;
    uint64_t used = 0;
    bool held = false;
    io::Batch batch;
  };

  void turn() {
    Half& half = halves_[active_];
    const uint64_t block = drive_.geometry().block;
    const uint64_t length = (half.used + block - 1) / block * block;
    std::memset(half.data + half.used, 0, length - half.used);
    half.batch.add(drive_, io::OpKind::kWrite, next_offset_, half.data,
                   static_cast<uint32_t>(length));
    half.batch.keep(region_);
    half.batch.submit();
    next_offset_ += length;
    half.used = 0;
    active_ = 1 - active_;
    settle(halves_[active_]);
  }

  void settle(Half& half) {
    if (half.batch.size() == 0 && !half.batch.in_flight()) return;
    try {
      half.batch.wait(drive_.timeout());
    } catch (const Error&) {
      for (const io::Failure& failure : half.batch.failures()) {
        // A transfer that could not be cancelled may still read this memory: never hand it out.
        if (failure.error == ETIMEDOUT) half.held = false;
      }
      throw;
    }
  }

  void release() {
    for (Half& half : halves_) {
      half.batch = io::Batch();  // waits for what another drive's failure left in flight
      if (half.held) arena_.release(half.arena_offset, half.capacity);
    }
  }

  io::BlockDevice& drive_;
  Arena& arena_;
  std::shared_ptr<Region> region_;
  uint64_t next_offset_;
  Half halves_[2];
  int active_ = 0;
};

}  // namespace

void write_segment(Segment& segment, const EntrySource& source,
                   const std::vector<std::shared_ptr<io::BlockDevice>>& drives, Arena& arena,
                   const std::shared_ptr<Region>& region) {
  const uint64_t share = (arena.size() - arena.used()) / (2 * drives.size());
  const uint64_t buffer =
      std::clamp(share / Arena::kGranule * Arena::kGranule, kSmallestBuffer, kLargestBuffer);
  std::vector<std::unique_ptr<DriveWriter>> writers;
  for (size_t drive = 0; drive < drives.size(); ++drive) {
    writers.push_back(std::make_unique<DriveWriter>(*drives[drive], arena, region, buffer,
                                                    segment.drive_offset[drive]));
  }
  std::vector<std::byte> entry(source.entry_bytes());
  std::vector<std::byte> code(segment.codec ? segment.entry_bytes : 0);
  segment.checksum.assign(segment.entries, 0);
  // Within a drive, copies follow member order, which is also the order of their offsets.
  for (size_t position = 0; position < segment.clusters.members.size(); ++position) {
    const int64_t n = segment.clusters.members[position];
    source.assemble(n, entry.data());
    if (segment.codec) segment.codec->encode(entry.data(), code.data());
    const std::byte* stored = segment.codec ? code.data() : entry.data();
    segment.checksum[n] = checksum_of(stored, segment.entry_bytes);
    writers[segment.placement.drive[position]]->append(stored, segment.entry_bytes);
  }
  for (auto& writer : writers) writer->finish();
}

}  // namespace swarm_kv
