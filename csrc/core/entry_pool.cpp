#include "core/entry_pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "io/error.h"

namespace swarm_kv {
namespace {

constexpr int64_t kChunkBytes = 128 << 10;

uint64_t page_size() {
  static const auto size = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return size;
}

uint64_t round_to_pages(uint64_t bytes) {
  return (bytes + page_size() - 1) / page_size() * page_size();
}

}  // namespace

Region::Region(uint64_t bytes) : size_(round_to_pages(std::max<uint64_t>(bytes, 1))) {
  void* memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(ErrorKind::kCapacity, "cannot map " + std::to_string(size_) +
                                          " bytes of address space: " + std::strerror(errno) +
                                          ". Lower `dram_bytes` or raise the limit (ulimit -v).");
  }
  data_ = static_cast<std::byte*>(memory);
  madvise(data_, size_, MADV_NOHUGEPAGE);  // a huge page would hold memory that nobody reserved
}

Region::~Region() { munmap(data_, size_); }

void Region::discard(uint64_t offset, uint64_t bytes) const {
  const uint64_t first = round_to_pages(offset);
  const uint64_t last = (offset + bytes) / page_size() * page_size();
  if (first < last) madvise(data_ + first, last - first, MADV_DONTNEED);
}

EntryPool::EntryPool(uint64_t staging_bytes, uint64_t window_bytes, uint64_t cache_bytes,
                     Budget& budget)
    : CacheMemory(
          static_cast<int64_t>(round_to_pages(staging_bytes) + round_to_pages(window_bytes)),
          static_cast<int64_t>(round_to_pages(cache_bytes))),
      budget_(budget),
      staging_bytes_(static_cast<int64_t>(round_to_pages(staging_bytes))),
      window_bytes_(static_cast<int64_t>(round_to_pages(window_bytes))) {
  // One page more: the last page of the cache is held whole.
  budget_.reserve(Use::kStaging, staging_bytes_ + page_size());
  try {
    region_ = std::make_shared<Region>(staging_bytes_ + window_bytes_ + cache_bytes_);
  } catch (...) {
    budget_.release(Use::kStaging, staging_bytes_ + page_size());
    throw;
  }
}

EntryPool::~EntryPool() {
  for (const Chunk& chunk : chunks_) {
    if (chunk.reserved) budget_.release(Use::kWindow, chunk_bytes_);
  }
  budget_.release(Use::kStaging, staging_bytes_ + page_size());
}

void EntryPool::set_entry_bytes(int64_t entry_bytes) {
  if (entry_bytes == entry_bytes_) return;
  if (entry_bytes_ != 0 || entry_bytes <= 0) {
    throw Error(ErrorKind::kArgument,
                "entries of " + std::to_string(entry_bytes) + " bytes do not fit this store" +
                    (entry_bytes_ ? ", which holds entries of " + std::to_string(entry_bytes_) +
                                        " bytes: open another store for another model or dtype"
                                  : ": an entry has at least one byte"));
  }
  entry_bytes_ = entry_bytes;
  chunk_slots_ = std::max<int64_t>(1, kChunkBytes / entry_bytes_);
  chunk_bytes_ = static_cast<int64_t>(round_to_pages(chunk_slots_ * entry_bytes_));
  chunks_.resize(window_bytes_ / chunk_bytes_);
  references_.assign(chunks_.size() * chunk_slots_, 0);
}

int64_t EntryPool::find(int64_t slot) const {
  const int64_t offset = slot - staging_bytes_;
  if (offset >= 0 && entry_bytes_ > 0) {
    const int64_t within = offset % chunk_bytes_;
    const int64_t index = offset / chunk_bytes_ * chunk_slots_ + within / entry_bytes_;
    const bool on_a_slot = within % entry_bytes_ == 0 && within / entry_bytes_ < chunk_slots_;
    if (on_a_slot && index < static_cast<int64_t>(references_.size()) && references_[index] > 0) {
      return index;
    }
  }
  return -1;
}

int64_t EntryPool::index_of(int64_t slot) const {
  const int64_t index = find(slot);
  if (index >= 0) return index;
  throw Error(ErrorKind::kArgument,
              "slot " + std::to_string(slot) + " is not an allocated window slot of this store");
}

std::vector<int64_t> EntryPool::allocate(int64_t count) {
  std::vector<int64_t> slots;
  slots.reserve(count);
  try {
    for (int64_t chunk_hint = 0; static_cast<int64_t>(slots.size()) < count;) {
      if (open_chunks_.empty()) {
        while (chunk_hint < static_cast<int64_t>(chunks_.size()) && chunks_[chunk_hint].reserved) {
          ++chunk_hint;
        }
        if (chunk_hint == static_cast<int64_t>(chunks_.size())) {
          throw Error(ErrorKind::kCapacity,
                      "no window slot is left of " + std::to_string(window_slots_) +
                          ": `dram_bytes` is too small for this batch and `window`");
        }
        budget_.reserve(Use::kWindow, chunk_bytes_);
        Chunk& chunk = chunks_[chunk_hint];
        chunk.reserved = true;
        for (int32_t i = static_cast<int32_t>(chunk_slots_); i-- > 0;) chunk.free.push_back(i);
        open_chunks_.insert(chunk_hint);
      }
      const int64_t number = *open_chunks_.begin();
      Chunk& chunk = chunks_[number];
      const int64_t index = number * chunk_slots_ + chunk.free.back();
      chunk.free.pop_back();
      ++chunk.used;
      ++window_slots_;
      if (chunk.free.empty()) open_chunks_.erase(number);
      references_[index] = 1;
      slots.push_back(slot_of(index));
    }
  } catch (const Error&) {
    release(slots);
    throw;
  }
  return slots;
}

void EntryPool::retain(std::span<const int64_t> slots) {
  for (const int64_t slot : slots) index_of(slot);
  for (const int64_t slot : slots) ++references_[index_of(slot)];
}

void EntryPool::release(std::span<const int64_t> slots) {
  std::vector<int64_t> unused;
  unused.reserve(slots.size());
  size_t dropped = 0;
  try {
    for (; dropped < slots.size(); ++dropped) {
      const int64_t index = index_of(slots[dropped]);
      if (--references_[index] == 0) unused.push_back(index);
    }
  } catch (const Error&) {
    for (const int64_t slot : slots.first(dropped)) {
      const int64_t offset = slot - staging_bytes_;
      ++references_[offset / chunk_bytes_ * chunk_slots_ + offset % chunk_bytes_ / entry_bytes_];
    }
    throw;
  }
  for (const int64_t index : unused) {
    const int64_t number = index / chunk_slots_;
    Chunk& chunk = chunks_[number];
    chunk.free.push_back(static_cast<int32_t>(index % chunk_slots_));
    open_chunks_.insert(number);
    --window_slots_;
    if (--chunk.used > 0) continue;
    open_chunks_.erase(number);
    chunk.free.clear();
    chunk.reserved = false;
    region_->discard(staging_bytes_ + number * chunk_bytes_, chunk_bytes_);
    budget_.release(Use::kWindow, chunk_bytes_);
  }
}

void EntryPool::copy(int64_t to, int64_t from) const {
  std::memcpy(at(to), at(from), entry_bytes_);
}

void EntryPool::discard_cache(int64_t first, int64_t last) const {
  if (first >= last) return;
  // Up to the end of the last page: it would stay behind for good when the next slots go.
  const uint64_t end = round_to_pages(cache_slot(last));
  region_->discard(cache_slot(first), end - cache_slot(first));
}

}  // namespace swarm_kv
