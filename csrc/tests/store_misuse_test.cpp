// Calls that do not fit the store's state: each is refused by name, and the store works on.
#include <gtest/gtest.h>

#include <cstring>
#include <future>

#include "tests/store_rig.h"

namespace swarm_kv {
namespace {

constexpr int64_t kHeadBytes = 256;

// Entry n is filled with n.
struct Numbered {
  std::vector<int32_t> halves;

  explicit Numbered(int64_t count) : halves(count * kHeadBytes / 4) {
    for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<int32_t>(i * 4 / kHeadBytes);
  }
  EntrySource source() const {
    const auto* base = reinterpret_cast<const std::byte*>(halves.data());
    return {{base, 0, kHeadBytes}, {base, 0, kHeadBytes}, 1, kHeadBytes};
  }
  bool matches(int64_t n, const std::byte* entry) const {
    const std::vector<int32_t> expected(kHeadBytes / 2, static_cast<int32_t>(n));
    return std::memcmp(expected.data(), entry, 2 * kHeadBytes) == 0;
  }
};

struct Misuse : testing::Test {
  static constexpr int64_t kEntries = 600;
  Numbered data{kEntries};
  std::unique_ptr<Rig> rig;
  int64_t segment = 0;

  void open(uint64_t staging_bytes = 1 << 20) {
    StoreOptions options;
    options.staging_bytes = staging_bytes;
    rig = std::make_unique<Rig>(3, options);
    segment = rig->store->write(data.source(), kEntries, overlapping(kEntries), "layer 0");
  }
  int64_t start(Purpose purpose = Purpose::kStream) const {
    return submit(*rig->store, {{{segment}, {}, range(0, kEntries), kEntries}}, purpose).ticket;
  }
  void delay(std::chrono::milliseconds by) const {
    for (const auto& drive : rig->drives) {
      drive->add_rule({.fault = io::FaultKind::kDelay, .count = UINT32_MAX, .delay = by});
    }
  }
  // Everything that was held has been given back, and all entries come as they were written.
  void expect_usable() const {
    for (const auto& drive : rig->drives) drive->clear_rules();
    EXPECT_EQ(number_in(rig->store->stats(), "tickets"), 0u);
    EXPECT_EQ(number_in(rig->store->stats(), "staged_bytes"), 0u);
    const auto seen = fetch(*rig->store, data, {segment}, {}, range(0, kEntries), kEntries);
    EXPECT_EQ(seen.size(), static_cast<size_t>(kEntries));
    EXPECT_TRUE(all_right(seen));
  }
};

TEST_F(Misuse, OfTwoThreadsThatWaitForATicketOneIsRefused) {
  open();
  for (const auto& drive : rig->drives) {
    drive->add_rule({.fault = io::FaultKind::kHold, .count = UINT32_MAX});
  }
  const int64_t ticket = start();
  std::string message;
  const auto receive_all = [&] {
    size_t entries = 0;
    try {
      for (bool more = true; more;) {
        const Part part = wait(*rig->store, ticket);
        entries += part.arrived.ids.size();
        more = part.more;
      }
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kState);
      message = error.what();
      for (const auto& drive : rig->drives) drive->clear_rules();  // the other one may go on
    }
    return entries;
  };
  auto other = std::async(std::launch::async, receive_all);
  const size_t arrived = receive_all();
  // Each entry came once; who asked while the other one waited was refused.
  EXPECT_EQ(arrived + other.get(), static_cast<size_t>(kEntries));
  EXPECT_NE(message.find("is being waited for by another thread"), std::string::npos) << message;
  rig->store->release_ticket(ticket);
  expect_usable();
}

TEST_F(Misuse, ATicketThatIsReleasedTwiceOrUnknown) {
  open();
  const int64_t ticket = start();
  rig->store->release_ticket(ticket);
  std::string message;
  for (const int64_t wrong : {ticket, int64_t{0}, int64_t{-1}, INT64_MAX, INT64_MIN}) {
    EXPECT_EQ(kind_of([&] { rig->store->release_ticket(wrong); }, &message), ErrorKind::kState);
    EXPECT_NE(message.find("ticket " + std::to_string(wrong) + " does not exist"),
              std::string::npos)
        << message;
    EXPECT_EQ(kind_of([&] { wait(*rig->store, wrong); }), ErrorKind::kState);
  }
  expect_usable();
}

TEST_F(Misuse, AStoreWithReadsInFlightDoesNotClose) {
  open();
  delay(std::chrono::milliseconds(50));
  const int64_t ticket = start();
  std::string message;
  EXPECT_EQ(kind_of([&] { rig->store->close(); }, &message), ErrorKind::kState);
  EXPECT_NE(message.find("1 fetches are outstanding; wait for and release them"), std::string::npos)
      << message;
  rig->store->release_ticket(ticket);
  expect_usable();
  rig->store->close();
  EXPECT_EQ(kind_of([&] { start(); }, &message), ErrorKind::kState);
  EXPECT_NE(message.find("the store is closed"), std::string::npos) << message;
}

TEST_F(Misuse, AStoreThatIsDestroyedWithReadsInFlightWaitsForThem) {
  open();
  delay(std::chrono::milliseconds(50));
  start();
  rig->store.reset();  // the sanitizer tells whether a read still had its memory
}

TEST_F(Misuse, WhatIsFreedWhileItIsReadStaysUntilThen) {
  open();
  const uint64_t stored = number_in(rig->store->stats(), "stored_bytes");
  const int64_t other = rig->store->write(data.source(), kEntries, overlapping(kEntries), "other");
  const auto reading =
      submit(*rig->store, {{{other}, {}, range(0, kEntries), kEntries}}, Purpose::kDecode);
  rig->store->free_segment(other);
  const int64_t third = rig->store->write(data.source(), kEntries, overlapping(kEntries), "third");
  const Seen seen = receive(*rig->store, data, reading);
  EXPECT_EQ(seen[0].size(), static_cast<size_t>(kEntries));
  EXPECT_TRUE(all_right(seen[0]));
  rig->store->free_segment(third);
  EXPECT_EQ(number_in(rig->store->stats(), "stored_bytes"), stored);
  expect_usable();
}

TEST_F(Misuse, MoreFetchesThanTheArenaHolds) {
  open(96 << 10);
  std::vector<int64_t> tickets;
  for (int i = 0; i < 20; ++i) tickets.push_back(start());  // submitting is always possible
  std::string message;
  EXPECT_EQ(kind_of([&] { wait(*rig->store, tickets.back()); }, &message), ErrorKind::kCapacity);
  EXPECT_NE(message.find("`staging_bytes`"), std::string::npos) << message;
  for (int i = 0; i < 19; ++i) rig->store->release_ticket(tickets[i]);
  size_t arrived = 0;
  for (bool more = true; more;) {
    const Part round = wait(*rig->store, tickets.back());
    arrived += round.arrived.ids.size();
    more = round.more;
  }
  EXPECT_EQ(arrived, static_cast<size_t>(kEntries));
  rig->store->release_ticket(tickets.back());
  expect_usable();
}

TEST_F(Misuse, ThreadsThatHoldTheArenaAgainstEachOtherAreToldAtOnce) {
  // Each thread holds memory with one fetch and wants more with another. The one that comes last
  // is refused and gives way; none waits for the time-out, which is that of the test, too. Threads
  // may take turns by chance, so they go on until they have met.
  open(64 << 10);
  constexpr int kEnough = 20, kTooMany = 100 * kEnough;
  std::atomic<int> refused = 0;
  const auto work = [&] {
    for (int round = 0; round < kEnough || (refused == 0 && round < kTooMany); ++round) {
      const int64_t held = start(), wanted = start();
      while (true) {
        try {
          wait(*rig->store, wanted);
          break;
        } catch (const Error& error) {
          ASSERT_EQ(error.kind(), ErrorKind::kCapacity) << error.what();
          ++refused;
          rig->store->release_ticket(held);
        }
        try {
          wait(*rig->store, wanted);
          break;
        } catch (const Error& error) {
          ASSERT_EQ(error.kind(), ErrorKind::kCapacity) << error.what();
        }
      }
      rig->store->release_ticket(wanted);
      try {
        rig->store->release_ticket(held);
      } catch (const Error&) {  // given way already
      }
    }
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(refused, 0);
  expect_usable();
}

TEST_F(Misuse, LimitsAndNumbersOutsideTheirRange) {
  open();
  std::string message;
  const auto refused = [&](std::vector<int64_t> clusters, std::vector<int64_t> entries,
                           int64_t limit) {
    const std::vector<Ask> asks{{{segment}, clusters, entries, limit}};
    EXPECT_EQ(kind_of([&] { submit(*rig->store, asks, Purpose::kDecode); }, &message),
              ErrorKind::kArgument);
    return message;
  };
  EXPECT_NE(refused({}, {0}, -1).find("the limit of row 0, -1, is below 0"), std::string::npos);
  EXPECT_NE(refused({}, {0}, INT64_MIN).find("is below 0"), std::string::npos);
  EXPECT_NE(refused({}, {INT64_MAX}, kEntries).find("is outside [0, 600)"), std::string::npos);
  EXPECT_NE(refused({}, {INT64_MIN}, kEntries).find("is outside [0, 600)"), std::string::npos);
  EXPECT_NE(refused({INT64_MAX}, {}, kEntries).find("does not exist"), std::string::npos);
  // A limit beyond the end is none.
  const auto seen = fetch(*rig->store, data, {segment}, {}, {0, 599}, INT64_MAX);
  EXPECT_EQ(seen.size(), 2u);
  EXPECT_TRUE(fetch(*rig->store, data, {segment}, {}, {0, 599}, 0).empty());
  expect_usable();
}

}  // namespace
}  // namespace swarm_kv
