// Fetches of several rows, and fetches that ride on a prefetch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "tests/numbered.h"
#include "tests/store_rig.h"

namespace swarm_kv {
namespace {

// A parent of 120 entries that two forks share, and 60 further entries of each fork.
struct Forks : Rig {
  int64_t shared, left, right;

  explicit Forks(StoreOptions options = {}) : Rig(3, options) {
    shared = store->write(Numbered(120).source(), 120, overlapping(120), "shared");
    left = store->write(Numbered(60, 120).source(), 60, overlapping(60), "left");
    right = store->write(Numbered(60, 120).source(), 60, overlapping(60), "right");
  }
  std::vector<Ask> asks(std::vector<int64_t> entries) const {
    return {{{shared, left}, {}, entries, 180}, {{shared, right}, {}, entries, 180}};
  }
  uint64_t count(const std::string& key, const std::string& purpose) const {
    return number_in(store->stats(), key, "\"" + purpose + "\": {");
  }
};

std::vector<int64_t> ids_of(const std::map<int64_t, bool>& seen) {
  std::vector<int64_t> ids;
  for (const auto& [id, right] : seen) ids.push_back(id);
  return ids;
}

TEST(BatchFetch, RowsThatShareASegmentShareItsReads) {
  const Forks forks;
  const auto seen = receive(*forks.store, Pattern{},
                            submit(*forks.store, forks.asks(range(100, 140)), Purpose::kStream));
  ASSERT_EQ(seen.size(), 2u);
  for (const auto& row : seen) {
    EXPECT_EQ(ids_of(row), range(100, 140));
    EXPECT_TRUE(all_right(row));
  }
  EXPECT_EQ(forks.count("wanted", "stream"), 20u + 2 * 20u);
  EXPECT_EQ(forks.count("read", "stream"), 60u);
  // One after the other, the shared entries are read twice.
  const Forks apart;
  for (const Ask& ask : apart.asks(range(100, 140))) {
    receive(*apart.store, Pattern{}, submit(*apart.store, {ask}, Purpose::kStream));
  }
  EXPECT_EQ(apart.count("read", "stream"), 80u);
}

TEST(BatchFetch, RowsHaveTheirOwnNumbersLimitsAndLists) {
  const Forks forks;
  // Row 0 names the shared segment second, row 2 wants nothing.
  const std::vector<Ask> asks = {{{forks.left, forks.shared}, {}, {0, 59, 60, 100}, 100},
                                 {{forks.shared}, {0, 15}, {5}, 30},
                                 {{}, {}, {}, 0},
                                 {{forks.shared}, {0}, {119}, 1000}};
  const auto submitted = submit(*forks.store, asks, Purpose::kDecode);
  const Part round = wait(*forks.store, submitted.ticket);
  EXPECT_FALSE(round.more);
  const std::vector<std::vector<int64_t>> expected = {
      {0, 59, 60},
      {0, 1, 2, 3, 4, 5, 6, 7, 9, 12, 15, 18, 21, 24, 27},
      {},
      {0, 1, 2, 3, 4, 5, 6, 7, 119}};
  for (size_t row = 0; row < asks.size(); ++row) {
    std::vector<int64_t> ids;
    for (int64_t i = round.arrived.rows[row]; i < round.arrived.rows[row + 1]; ++i) {
      const int64_t id = round.arrived.ids[i];
      ids.push_back(id);
      const Pattern pattern{row > 0 ? 0 : id < 60 ? 120 : -60};
      EXPECT_TRUE(pattern.matches(id, forks.store->region()->data() + round.arrived.slots[i]));
    }
    std::sort(ids.begin(), ids.end());
    EXPECT_EQ(ids, expected[row]) << "row " << row;
  }
  forks.store->release_ticket(submitted.ticket);
  // What one row brought is cached for the others.
  const auto again = submit(*forks.store, {asks[3], asks[1]}, Purpose::kDecode);
  EXPECT_EQ(again.resident.rows, (std::vector<int64_t>{0, 9, 9 + 15}));
  forks.store->release_ticket(again.ticket);
}

TEST(BatchFetch, WrongRowsAreRefusedAndNothingIsLeftBehind) {
  const Forks forks;
  const int64_t shared = forks.shared;
  for (const std::vector<Ask>& asks : std::vector<std::vector<Ask>>{
           {{{shared}, {}, {0}, 120}, {{shared}, {}, {120}, 120}},  // row 0's numbers are right
           {{{shared, shared}, {}, {0}, 120}}}) {
    EXPECT_EQ(kind_of([&] { submit(*forks.store, asks, Purpose::kDecode); }), ErrorKind::kArgument);
  }
  EXPECT_EQ(kind_of([&] { submit(*forks.store, {{{shared, 987}, {}, {0}, 9}}, Purpose::kDecode); }),
            ErrorKind::kState);
  forks.store->close();
}

TEST(Prefetch, WhatItReadsIsNotReadAgain) {
  const Forks forks;
  const auto early = submit(*forks.store, forks.asks(range(0, 100)), Purpose::kPrefetch);
  const auto late =
      submit(*forks.store, forks.asks(range(50, 130)), Purpose::kDecode, early.ticket);
  const auto seen = receive(*forks.store, Pattern{}, late);
  for (const auto& row : seen) {
    EXPECT_EQ(ids_of(row), range(50, 130));
    EXPECT_TRUE(all_right(row));
  }
  EXPECT_EQ(forks.count("read", "prefetch"), 100u);
  EXPECT_EQ(forks.count("used", "prefetch"), 50u);
  EXPECT_EQ(forks.count("wasted", "prefetch"), 50u);
  EXPECT_EQ(forks.count("late", "prefetch"), 20u + 2 * 10u);
  EXPECT_EQ(forks.count("late_requests", "prefetch"), forks.count("requests", "decode"));
  EXPECT_EQ(forks.count("late_bytes", "prefetch"), forks.count("bytes", "decode"));
  EXPECT_EQ(forks.count("read", "decode"), 40u);
  EXPECT_EQ(kind_of([&] { wait(*forks.store, early.ticket); }), ErrorKind::kState);
  // Also what was read in vain is in the cluster cache.
  const auto again = submit(*forks.store, forks.asks(range(0, 130)), Purpose::kDecode);
  EXPECT_EQ(again.resident.ids.size(), 2 * 130u);
  forks.store->release_ticket(again.ticket);
  forks.store->close();
}

TEST(Prefetch, WithoutRidingEverythingIsReadAgain) {
  const Forks forks;
  const auto early = submit(*forks.store, forks.asks(range(0, 100)), Purpose::kPrefetch);
  receive(*forks.store, Pattern{},
          submit(*forks.store, forks.asks(range(50, 130)), Purpose::kDecode));
  EXPECT_EQ(forks.count("read", "decode"), 50u + 20u + 2 * 10u);
  forks.store->release_ticket(early.ticket);
  EXPECT_EQ(forks.count("wasted", "prefetch"), 100u);
  EXPECT_EQ(forks.count("used", "prefetch"), 0u);
}

// The window grows between a prefetch and the fetch that rides on it.
TEST(Prefetch, HoldsNothingBackFromTheWindow) {
  StoreOptions options;
  options.dram_bytes = 384 << 10;
  options.staging_bytes = 64 << 10;
  Rig rig(2, options);
  const int64_t segment = rig.store->write(Numbered(400).source(), 400, overlapping(400), "layer");
  const std::vector<Ask> asks{{{segment}, {}, range(0, 400), 400}};
  receive(*rig.store, Pattern{}, submit(*rig.store, asks, Purpose::kDecode));  // fills the cache
  const auto window = [&] { rig.store->release(rig.store->append(Numbered(500).source(), 500)); };
  const auto due = submit(*rig.store, asks, Purpose::kDecode);
  ASSERT_FALSE(due.resident.ids.empty());
  EXPECT_EQ(kind_of(window), ErrorKind::kCapacity);
  rig.store->release_ticket(due.ticket);
  const auto early = submit(*rig.store, asks, Purpose::kPrefetch);
  window();
  const auto seen =
      receive(*rig.store, Pattern{}, submit(*rig.store, asks, Purpose::kDecode, early.ticket));
  EXPECT_EQ(seen[0].size(), 400u);
  EXPECT_TRUE(all_right(seen[0]));
}

TEST(Prefetch, WhatHasArrivedIsThereAtOnce) {
  const Forks forks;
  const auto early = submit(*forks.store, forks.asks(range(0, 60)), Purpose::kPrefetch);
  EXPECT_FALSE(wait(*forks.store, early.ticket).more);
  const std::vector<Ask> one{{{forks.right}, {}, range(0, 10), 60},
                             {{forks.shared}, {}, range(30, 90), 120}};
  const auto late = submit(*forks.store, one, Purpose::kStream, early.ticket);
  EXPECT_EQ(late.resident.rows, (std::vector<int64_t>{0, 0, 30}));
  forks.store->free_segment(forks.left);  // only the prefetch held it
  const auto seen = receive(*forks.store, Pattern{120}, late);
  EXPECT_EQ(ids_of(seen[0]), range(0, 10));
  EXPECT_TRUE(all_right(seen[0]));
  EXPECT_EQ(ids_of(seen[1]), range(30, 90));
  EXPECT_FALSE(all_right(seen[1]));  // the pattern of row 0
  forks.store->close();
}

TEST(Prefetch, NeverFillsTheArena) {
  StoreOptions options;
  options.staging_bytes = 64 << 10;  // 48 KiB of it for reads: less than the wanted entries
  const Forks forks(options);
  std::vector<Submitted> early;
  for (int i = 0; i < 3; ++i) {
    early.push_back(submit(*forks.store, forks.asks(range(0, 180)), Purpose::kPrefetch));
  }
  EXPECT_LT(forks.count("read", "prefetch"), 180u);
  const uint64_t covered = forks.count("read", "prefetch");
  EXPECT_GT(covered, 0u);
  // One that started nothing carries nothing; what one has started is not read again.
  for (const size_t i : {2, 0}) {
    const uint64_t before = forks.count("read", "decode") + forks.count("read", "stream");
    const auto seen =
        receive(*forks.store, Pattern{},
                submit(*forks.store, forks.asks(range(0, 180)), Purpose::kStream, early[i].ticket));
    for (const auto& row : seen) {
      EXPECT_EQ(ids_of(row), range(0, 180));
      EXPECT_TRUE(all_right(row));
    }
    EXPECT_EQ(forks.count("read", "stream") - before, 240 - (i == 0 ? covered : 0));
  }
  forks.store->release_ticket(early[1].ticket);
  forks.store->close();
}

TEST(Prefetch, AFailedReadIsRepairedByTheFetchThatRidesOnIt) {
  for (const bool replica : {true, false}) {
    const Forks forks;
    for (const auto& drive : forks.drives) {
      drive->add_rule({.fault = io::FaultKind::kError, .count = replica ? 1 : UINT32_MAX});
    }
    // Entry 0 is held twice, entry 1 once.
    const auto asks = forks.asks({replica ? 0 : 1});
    const auto early = submit(*forks.store, asks, Purpose::kPrefetch);
    const auto late = submit(*forks.store, asks, Purpose::kDecode, early.ticket);
    if (replica) {
      const auto seen = receive(*forks.store, Pattern{}, late);
      EXPECT_TRUE(all_right(seen[0]) && all_right(seen[1]));
      EXPECT_EQ(ids_of(seen[1]), range(0, 1));
      EXPECT_EQ(forks.count("repaired", "prefetch") + forks.count("repaired", "decode"), 1u);
    } else {
      std::string message;
      EXPECT_EQ(kind_of([&] { wait(*forks.store, late.ticket); }, &message), ErrorKind::kStorage);
      EXPECT_NE(message.find("shared"), std::string::npos) << message;
    }
    forks.store->close();
  }
}

TEST(Prefetch, OnlyAPrefetchIsRiddenOnAndRefusalLeavesItAsItWas) {
  const Forks forks;
  const auto asks = forks.asks(range(0, 20));
  const auto decode = submit(*forks.store, asks, Purpose::kDecode);
  EXPECT_EQ(kind_of([&] { submit(*forks.store, asks, Purpose::kDecode, decode.ticket); }),
            ErrorKind::kArgument);
  forks.store->release_ticket(decode.ticket);
  const auto early = submit(*forks.store, asks, Purpose::kPrefetch);
  EXPECT_EQ(kind_of([&] { submit(*forks.store, asks, Purpose::kPrefetch, early.ticket); }),
            ErrorKind::kArgument);
  EXPECT_EQ(kind_of([&] { submit(*forks.store, asks, Purpose::kDecode, 987); }), ErrorKind::kState);
  EXPECT_EQ(
      kind_of([&] { submit(*forks.store, forks.asks({180}), Purpose::kDecode, early.ticket); }),
      ErrorKind::kArgument);
  EXPECT_EQ(forks.count("used", "prefetch") + forks.count("wasted", "prefetch"), 0u);
  const auto seen = receive(*forks.store, Pattern{}, early);  // a prefetch may be received as well
  EXPECT_EQ(ids_of(seen[1]), range(0, 20));
  EXPECT_TRUE(all_right(seen[0]) && all_right(seen[1]));
  forks.store->close();
}

}  // namespace
}  // namespace swarm_kv
