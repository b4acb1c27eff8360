// Entries in code, from write to fetch: what arrives is what the codec makes of them, byte by byte.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "core/codec.h"
#include "tests/store_rig.h"

namespace swarm_kv {
namespace {

constexpr int64_t kHeads = 2;
constexpr int64_t kHeadDim = 48;
constexpr int64_t kNumbers = 2 * kHeads * kHeadDim;
constexpr int64_t kEntryBytes = kNumbers * sizeof(float);
constexpr int64_t kKivi4Bytes = 120;  // two halves of three groups of 20 bytes

using Entry = std::vector<float>;

// Random entries of one layer, written as segments in different codecs.
struct Coded {
  std::vector<float> keys, values;
  int64_t count;
  std::vector<Entry> expected;  // of the entries written so far

  Coded(int64_t count, unsigned seed) : count(count) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < count * kHeads * kHeadDim; ++i) {
      keys.push_back((i % 16 == 3 ? 20.0f : 1.0f) * (1.0f + normal(random)));
      values.push_back(normal(random));
    }
  }

  EntrySource source(int64_t first) const {
    const auto half = [&](const std::vector<float>& numbers) {
      constexpr int64_t kRow = kHeadDim * sizeof(float);
      return EntrySource::Half{reinterpret_cast<const std::byte*>(numbers.data()) + first * kRow,
                               count * kRow, kRow};
    };
    return {half(keys), half(values), kHeads, kHeadDim * sizeof(float), Element::kFloat32};
  }

  Entry plain(int64_t n) const {
    Entry entry(kNumbers);
    source(n).assemble(0, reinterpret_cast<std::byte*>(entry.data()));
    return entry;
  }

  // The next `entries` entries as a segment of `store`.
  int64_t write(Store& store, int64_t entries, Clusters clusters, const std::string& codec,
                const InitialFill& fill = {}) {
    const int64_t first = static_cast<int64_t>(expected.size());
    const auto coder = make_codec(codec, source(first), entries);
    for (int64_t n = first; n < first + entries; ++n) {
      Entry entry = plain(n);
      if (coder) {
        std::vector<std::byte> code(coder->stored_bytes());
        auto* bytes = reinterpret_cast<std::byte*>(entry.data());
        coder->encode(bytes, code.data());
        coder->decode(code.data(), bytes);
      }
      expected.push_back(std::move(entry));
    }
    return store.write(source(first), entries, std::move(clusters), "layer 5", fill, codec);
  }

  bool matches(int64_t n, const std::byte* entry) const {
    return std::memcmp(expected[n].data(), entry, kEntryBytes) == 0;
  }

  // Root mean square error of all entries written, relative to that of zeros.
  double error() const {
    double error = 0, power = 0;
    for (size_t n = 0; n < expected.size(); ++n) {
      const Entry entry = plain(static_cast<int64_t>(n));
      for (int64_t i = 0; i < kNumbers; ++i) {
        error += std::pow(expected[n][i] - entry[i], 2);
        power += std::pow(entry[i], 2);
      }
    }
    return std::sqrt(error / power);
  }
};

// Every entry twice, its copies on different ones of three drives; in no order, so that no cluster
// is a stretch of the sequence. `entries` is a multiple of 3, and not of 7.
Clusters twice(int64_t entries) {
  Clusters clusters;
  for (int64_t copy = 0; copy < 2; ++copy) {
    for (int64_t i = 0; i < entries; ++i) {
      clusters.members.push_back((i + copy) * 7 % entries);
      if (i % 6 == 5 || i == entries - 1) clusters.offsets.push_back(clusters.members.size());
    }
  }
  return clusters;
}

void fail(const Rig& rig, io::FaultKind fault, uint32_t count) {
  for (const auto& drive : rig.drives) drive->add_rule({.fault = fault, .count = count});
}

TEST(CodecStore, WhatArrivesIsWhatTheCodecMakesOfIt) {
  const std::vector<std::tuple<std::string, double, double>> cases = {
      {"none", 0.0, 0.0}, {"int8", 1e-4, 0.02}, {"kivi4", 0.01, 0.15}};
  for (const auto& [codec, least, most] : cases) {
    Rig rig;
    Coded data(300, 1), other(300, 2);
    const int64_t segment = data.write(*rig.store, 300, overlapping(300), codec);
    const auto seen = fetch(*rig.store, data, {segment}, {}, range(0, 300), 300);
    EXPECT_EQ(seen.size(), 300u);
    EXPECT_TRUE(all_right(seen)) << codec;
    EXPECT_GE(data.error(), least) << codec;
    EXPECT_LE(data.error(), most) << codec;
    other.write(*rig.store, 300, overlapping(300), codec);
    EXPECT_FALSE(all_right(fetch(*rig.store, other, {segment}, {}, range(0, 300), 300))) << codec;
  }
}

TEST(CodecStore, StoresAndReadsFewerBytes) {
  Rig rig;
  Coded data(300, 1);
  const int64_t segment = data.write(*rig.store, 300, overlapping(300), "kivi4");
  const uint64_t copies = number_in(rig.store->stats(), "stored_copies");
  EXPECT_EQ(number_in(rig.store->stats(), "stored_bytes"), copies * kKivi4Bytes);
  EXPECT_EQ(number_in(rig.store->stats(), "entry_bytes"), uint64_t{kEntryBytes});
  fetch(*rig.store, data, {segment}, {}, range(0, 300), 300, Purpose::kStream);
  uint64_t read = 0;
  for (const auto& drive : rig.drives) read += drive->counters().read_bytes;
  EXPECT_LT(read, copies * kKivi4Bytes + 3 * 2 * 4096);
}

TEST(CodecStore, SegmentsOfALayerMayDiffer) {
  Rig rig;
  Coded data(240, 1);
  std::vector<int64_t> segments;
  for (const char* codec : {"kivi4", "none", "int8", "kivi4"}) {
    segments.push_back(data.write(*rig.store, 60, overlapping(60), codec));
  }
  for (const Purpose purpose : {Purpose::kStream, Purpose::kDecode}) {
    const auto seen = fetch(*rig.store, data, segments, {}, range(0, 240), 240, purpose);
    EXPECT_EQ(seen.size(), 240u);
    EXPECT_TRUE(all_right(seen));
  }
  // Segments are told apart: in another order, other entries have these numbers.
  std::reverse(segments.begin(), segments.end());
  EXPECT_FALSE(all_right(fetch(*rig.store, data, segments, {}, range(0, 240), 240)));
}

TEST(CodecStore, ADamagedEntryIsServedByItsOtherCopy) {
  for (const char* codec : {"int8", "kivi4"}) {
    Rig rig;
    Coded data(90, 1);
    const int64_t segment = data.write(*rig.store, 90, twice(90), codec);
    fail(rig, io::FaultKind::kCorrupt, 1);
    const auto seen = fetch(*rig.store, data, {segment}, range(0, 15), {}, 90);
    EXPECT_EQ(seen.size(), 90u);
    EXPECT_TRUE(all_right(seen)) << codec;
    EXPECT_EQ(number_in(rig.store->stats(), "repaired"), rig.drives.size()) << codec;
  }
}

TEST(CodecStore, WithoutAnotherCopyDamageIsAnError) {
  for (const char* codec : {"int8", "kivi4"}) {
    Rig rig;
    Coded data(90, 1);
    Clusters once = twice(90);
    once.members.resize(90);
    once.offsets.resize(16);
    const int64_t segment = data.write(*rig.store, 90, once, codec);
    rig.drives[1]->add_rule({.fault = io::FaultKind::kCorrupt, .count = 1});
    const auto read = [&] { return fetch(*rig.store, data, {segment}, {}, range(0, 90), 90); };
    std::string message;
    EXPECT_EQ(kind_of([&] { read(); }, &message), ErrorKind::kStorage) << codec;
    for (const char* part : {"drive1", "layer 5", "checksum"}) {
      EXPECT_NE(message.find(part), std::string::npos) << message;
    }
    EXPECT_TRUE(all_right(read()));  // nothing damaged was kept
  }
}

TEST(CodecStore, TheChecksumIsOfTheCode) {
  StoreOptions options;
  options.verify = false;
  Rig rig(3, options);
  Coded data(90, 1);
  const int64_t segment = data.write(*rig.store, 90, twice(90), "kivi4");
  fail(rig, io::FaultKind::kCorrupt, 1);
  EXPECT_FALSE(all_right(fetch(*rig.store, data, {segment}, range(0, 15), {}, 90)));
}

TEST(CodecStore, SmallStagingMemoryTakesRounds) {
  for (const char* codec : {"int8", "kivi4"}) {
    for (const uint64_t staging : {48 << 10, 64 << 10, 256 << 10}) {  // from the least there can be
      StoreOptions options;
      options.staging_bytes = staging;
      Rig rig(3, options);
      Coded data(999, 1);
      const int64_t segment = data.write(*rig.store, 999, twice(999), codec);
      int rounds = 0;
      const auto seen =
          fetch(*rig.store, data, {segment}, {}, range(0, 999), 999, Purpose::kStream, &rounds);
      EXPECT_EQ(seen.size(), 999u);
      EXPECT_TRUE(all_right(seen)) << codec << " " << staging;
      // Decoded entries take staging memory, of which a half is one round's.
      EXPECT_GT(rounds, static_cast<int>(999 * kEntryBytes / staging)) << codec << " " << staging;
    }
  }
}

TEST(CodecStore, TheClusterCacheServesDecodedEntries) {
  for (const char* codec : {"int8", "kivi4"}) {
    Rig rig;
    Coded data(300, 1);
    const int64_t segment = data.write(*rig.store, 300, twice(300), codec);
    fetch(*rig.store, data, {segment}, {}, range(0, 100), 300);
    fail(rig, io::FaultKind::kError, UINT32_MAX);  // what is read from now on is an error
    const auto seen = fetch(*rig.store, data, {segment}, {}, range(0, 100), 300);
    EXPECT_EQ(seen.size(), 100u);
    EXPECT_TRUE(all_right(seen)) << codec;
    EXPECT_EQ(kind_of([&] { fetch(*rig.store, data, {segment}, {}, range(0, 101), 300); }),
              ErrorKind::kStorage);
  }
}

TEST(CodecStore, TheInitialFillHoldsWhatAReadWouldBring) {
  for (const char* codec : {"none", "int8", "kivi4"}) {
    Rig rig;
    Coded data(300, 1);
    std::vector<int32_t> activations(300, 1);
    const int64_t segment =
        data.write(*rig.store, 300, twice(300), codec, {"printed", activations, 8});
    fail(rig, io::FaultKind::kError, UINT32_MAX);
    const auto seen = fetch(*rig.store, data, {segment}, {}, range(0, 300), 300);
    EXPECT_EQ(seen.size(), 300u);
    EXPECT_TRUE(all_right(seen)) << codec;
  }
}

TEST(CodecStore, NumbersThatTheCodecRefusesLeaveNothingBehind) {
  for (const char* codec : {"int8", "kivi4"}) {
    Rig rig;
    Coded data(90, 1);
    const std::string before = rig.store->stats();
    const EntrySource source = data.source(0);
    data.values[40] = NAN;
    EXPECT_EQ(kind_of([&] { rig.store->write(source, 90, overlapping(90), "x", {}, codec); }),
              ErrorKind::kArgument);
    EXPECT_EQ(number_in(rig.store->stats(), "index"), number_in(before, "index"));
    EXPECT_EQ(number_in(rig.store->stats(), "padding_bytes"), 0u);
    data.values[40] = 1;
    const int64_t segment = data.write(*rig.store, 90, overlapping(90), codec);
    EXPECT_TRUE(all_right(fetch(*rig.store, data, {segment}, {}, range(0, 90), 90)));
  }
}

}  // namespace
}  // namespace swarm_kv
