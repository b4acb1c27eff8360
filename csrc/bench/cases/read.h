#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/cases/data.h"
#include "core/codec.h"
#include "core/store.h"

namespace swarm_kv::bench {

// Entries of 4 KiB: K and V of 8 heads of 128 numbers in 16 bits.
class Entries {
 public:
  static constexpr int64_t kHeads = 8, kHeadBytes = 256, kBytes = 2 * kHeads * kHeadBytes;

  Entries(int64_t count, Random& random)
      : numbers_(random.numbers<fp16>(count * kBytes / sizeof(fp16))) {}
  EntrySource source() const {
    const auto* base = reinterpret_cast<const std::byte*>(numbers_.data());
    return {.keys = {base, kHeadBytes, kBytes},
            .values = {base + kBytes / 2, kHeadBytes, kBytes},
            .heads = kHeads,
            .head_bytes = kHeadBytes,
            .element = Element::kFloat16};
  }

 private:
  std::vector<fp16> numbers_;
};

// Checksums of entries.
class Checksum {
 public:
  explicit Checksum(int64_t entries) : data_(random_.bytes(entries * Entries::kBytes)) {}

  void run() {
    for (int64_t n = 0; n < items(); ++n) {
      sum_ += checksum_of(reinterpret_cast<const std::byte*>(data_.data()) + n * Entries::kBytes,
                          Entries::kBytes);
    }
  }
  int64_t items() const { return bytes() / Entries::kBytes; }
  int64_t bytes() const { return static_cast<int64_t>(data_.size()); }

 private:
  Random random_{11};
  std::vector<uint8_t> data_;
  uint32_t sum_ = 0;
};

// Entries from their code; bytes are those of code and entry.
class Decode {
 public:
  Decode(int64_t entries, const std::string& name)
      : codec_(make_codec(name, plain_.source(), entries)),
        codes_(entries * codec_->stored_bytes()),
        entry_(Entries::kBytes) {
    for (int64_t n = 0; n < entries; ++n) {
      plain_.source().assemble(n, entry_.data());
      codec_->encode(entry_.data(), codes_.data() + n * codec_->stored_bytes());
    }
  }

  void run() {
    for (int64_t n = 0; n < items(); ++n) {
      codec_->decode(codes_.data() + n * codec_->stored_bytes(), entry_.data());
    }
  }
  int64_t items() const { return static_cast<int64_t>(codes_.size()) / codec_->stored_bytes(); }
  int64_t bytes() const { return static_cast<int64_t>(codes_.size()) + items() * Entries::kBytes; }

 private:
  Random random_{12};
  Entries plain_{kLearned, random_};
  std::unique_ptr<Codec> codec_;
  std::vector<std::byte> codes_, entry_;

  static constexpr int64_t kLearned = 1024;
};

// A whole fetch from drives in memory: plan, copy, check and hand over a tenth of the entries.
class Fetch {
 public:
  explicit Fetch(int64_t entries) : entries_(entries) {
    Random random(13);
    std::vector<io::DeviceOptions> drives(4);
    for (io::DeviceOptions& drive : drives) drive.engine = "memory";
    StoreOptions options;
    options.staging_bytes = 16 << 20;
    options.dram_bytes = 64 << 20;
    options.placement = "sequential";
    options.model = four_drives().front().model;
    store_ = std::make_unique<Store>(options, io::open_devices(drives));
    Clusters clusters = scattered_clusters(entries, 0, random);
    selected_ = stretches(entries, 24, random);
    for (int64_t& n : selected_) n = clusters.members[n];
    segments_ = {store_->write(Entries(entries, random).source(), entries, std::move(clusters),
                               "a benchmark")};
  }

  void run() {
    const Row row{segments_, {}, selected_, entries_};
    // Streams are not offered to the cluster cache: each run reads.
    const int64_t ticket = store_->submit({&row, 1}, Purpose::kStream, 0, delivery_);
    while (store_->wait(ticket, delivery_)) {
    }
    store_->release_ticket(ticket);
  }
  int64_t items() const { return static_cast<int64_t>(selected_.size()); }
  int64_t bytes() const { return items() * Entries::kBytes; }

 private:
  int64_t entries_;
  std::unique_ptr<Store> store_;
  std::vector<int64_t> segments_, selected_;
  Delivery delivery_;
};

}  // namespace swarm_kv::bench
