// What threads may do at the same time, and what a fetch leaves behind however it ends.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tests/numbered.h"
#include "tests/store_rig.h"

namespace swarm_kv {
namespace {

using io::FaultKind;
using io::FaultRule;

constexpr FaultRule kHoldReads{.fault = FaultKind::kHold, .count = UINT32_MAX};
constexpr FaultRule kHoldWrites{
    .fault = FaultKind::kHold, .kind = io::OpKind::kWrite, .count = UINT32_MAX};

struct Stored : Rig {
  int64_t segment;

  explicit Stored(StoreOptions options = {}, std::chrono::milliseconds timeout = {})
      : Rig(3, options, "memory", 0, timeout) {
    segment = store->write(Numbered(300).source(), 300, overlapping(300), "layer 0");
  }
  Submitted start(std::vector<int64_t> entries, Purpose purpose = Purpose::kStream) {
    return submit(*store, {{{segment}, {}, entries, 300}}, purpose);
  }
  void expect_all(int64_t first, int64_t last) {
    const auto seen = receive(*store, Pattern{}, start(range(first, last)));
    EXPECT_EQ(seen[0].size(), static_cast<size_t>(last - first));
    EXPECT_TRUE(all_right(seen[0]));
  }
  uint64_t staged() { return number_in(store->stats(), "staged_bytes"); }
};

TEST(Async, APartIsDeliveredWhileTheRestIsInFlight) {
  StoreOptions options;
  options.model = {1e-7, 1e-9};  // gaps are not worth reading: a request for each entry
  Stored stored(options);
  stored.drives[0]->add_rule(kHoldReads);
  std::vector<int64_t> far;
  for (int64_t n = 1; n < 300; n += 10) far.push_back(n);
  const auto submitted = stored.start(far);
  const Part part = wait(*stored.store, submitted.ticket);
  EXPECT_TRUE(part.more);
  EXPECT_FALSE(part.arrived.ids.empty());
  EXPECT_LT(part.arrived.ids.size(), far.size());
  Seen seen;
  take(*stored.store, Pattern{}, part.arrived, seen);
  stored.drives[0]->clear_rules();
  const Submitted rest{submitted.ticket, {{}, {}, {0, 0}}};
  const auto later = receive(*stored.store, Pattern{}, rest);
  for (const auto& [id, right] : later[0]) {
    EXPECT_FALSE(seen[0].contains(id));
    seen[0][id] = right;
  }
  EXPECT_EQ(seen[0].size(), far.size());
  EXPECT_TRUE(all_right(seen[0]));
}

TEST(Async, ARoundFollowsBeforeTheSlowestReadOfTheOneBeforeItHasEnded) {
  StoreOptions options;
  options.model = {1e-7, 1e-9};
  options.staging_bytes = 256 << 10;  // 32 reads in the first round
  Stored stored(options);
  stored.drives[0]->add_rule({.fault = FaultKind::kHold, .count = 1});
  std::vector<int64_t> far;
  for (int64_t n = 1; n < 300; n += 3) far.push_back(n);
  const auto started = [&] { return number_in(stored.store->stats(), "requests", "\"stream\""); };
  auto submitted = stored.start(far);
  const uint64_t at_first = started();
  EXPECT_LT(at_first, far.size());
  Seen seen;
  take(*stored.store, Pattern{}, submitted.resident, seen);
  const Part part = wait(*stored.store, submitted.ticket);
  take(*stored.store, Pattern{}, part.arrived, seen);
  EXPECT_TRUE(part.more);
  EXPECT_LT(seen[0].size(), at_first);
  EXPECT_GT(started(), at_first);
  stored.drives[0]->clear_rules();
  for (bool more = true; more;) {
    const Part next = wait(*stored.store, submitted.ticket);
    take(*stored.store, Pattern{}, next.arrived, seen);
    more = next.more;
  }
  stored.store->release_ticket(submitted.ticket);
  EXPECT_EQ(seen[0].size(), far.size());
  EXPECT_TRUE(all_right(seen[0]));
  EXPECT_EQ(stored.staged(), 0u);
}

TEST(Async, ARepairHoldsNobodyUp) {
  Stored stored;
  for (const auto& drive : stored.drives) {
    drive->add_rule({.fault = FaultKind::kError, .count = 1});
  }
  const auto first = stored.start({0});  // fails on its drive; the other copies are held
  while (stored.drives[0]->faults() + stored.drives[1]->faults() + stored.drives[2]->faults() ==
         0) {
    std::this_thread::yield();
  }
  for (const auto& drive : stored.drives) {
    drive->clear_rules();
    drive->add_rule({.fault = FaultKind::kHold, .count = 1});
  }
  std::atomic<bool> done = false;
  std::thread waiter([&] {
    const auto seen = receive(*stored.store, Pattern{}, first);
    EXPECT_TRUE(all_right(seen[0]));
    done = true;
  });
  const auto held = [&] {
    uint64_t faults = 0;
    for (const auto& drive : stored.drives) faults += drive->faults();
    return faults;
  };
  while (held() < 2) std::this_thread::yield();
  const auto slots = stored.store->append(Numbered(3).source(), 3);
  stored.store->release(slots);
  const auto other = stored.start({100});
  stored.store->release_ticket(other.ticket);
  const int64_t more = stored.store->write(Numbered(9).source(), 9, overlapping(9), "more");
  stored.store->free_segment(more);
  EXPECT_FALSE(done);
  for (const auto& drive : stored.drives) drive->clear_rules();
  waiter.join();
  EXPECT_EQ(number_in(stored.store->stats(), "repaired", "\"stream\""), 1u);
  EXPECT_EQ(stored.staged(), 0u);
}

TEST(Async, AWriteHoldsReadersUpNeitherInSuccessNorInFailure) {
  for (const bool fails : {false, true}) {
    Stored stored;
    stored.drives[1]->add_rule(kHoldWrites);
    std::atomic<bool> done = false;
    std::thread writer([&] {
      const auto write = [&] {
        const int64_t more =
            stored.store->write(Numbered(90).source(), 90, overlapping(90), "more");
        stored.store->free_segment(more);
      };
      if (fails) {
        EXPECT_EQ(kind_of(write), ErrorKind::kStorage);
      } else {
        write();
      }
      done = true;
    });
    while (stored.drives[1]->faults() == 0) std::this_thread::yield();
    stored.expect_all(0, 100);
    const int64_t ticket = stored.start(range(0, 10)).ticket;
    EXPECT_EQ(kind_of([&] { stored.store->close(); }), ErrorKind::kState);
    stored.store->release_ticket(ticket);
    std::string message;
    EXPECT_EQ(kind_of([&] { stored.store->close(); }, &message), ErrorKind::kState);
    EXPECT_NE(message.find("being written"), std::string::npos) << message;
    EXPECT_FALSE(done);
    if (fails) {
      stored.drives[2]->add_rule(
          {.fault = FaultKind::kError, .kind = io::OpKind::kWrite, .count = UINT32_MAX});
    }
    stored.drives[1]->clear_rules();
    writer.join();
    stored.drives[2]->clear_rules();
    stored.expect_all(200, 300);
    EXPECT_EQ(number_in(stored.store->stats(), "stored_entries"), 300u);
    stored.store->write(Numbered(90).source(), 90, overlapping(90), "again");
    stored.store->close();
  }
}

TEST(Async, ATicketServesOneThreadAtATimeAndMayBeReleasedMeanwhile) {
  Stored stored;
  for (const auto& drive : stored.drives) drive->add_rule(kHoldReads);
  const int64_t ticket = stored.start(range(0, 100)).ticket;
  std::string message;
  std::atomic<bool> ended = false;
  std::thread waiter([&] {
    EXPECT_EQ(kind_of([&] { wait(*stored.store, ticket); }, &message), ErrorKind::kState);
    ended = true;
  });
  const auto second_wait = [&] { return kind_of([&] { wait(*stored.store, ticket); }); };
  // No prefetch, but before that is looked at, it must be nobody else's.
  const auto use = [&] { submit(*stored.store, {}, Purpose::kDecode, ticket); };
  while (kind_of(use) != ErrorKind::kState && !ended) std::this_thread::yield();
  EXPECT_FALSE(ended) << message;
  EXPECT_EQ(second_wait(), ErrorKind::kState);
  stored.store->release_ticket(ticket);
  EXPECT_EQ(kind_of([&] { stored.store->close(); }), ErrorKind::kState);  // the thread has it yet
  for (const auto& drive : stored.drives) drive->clear_rules();
  waiter.join();
  EXPECT_NE(message.find("was released while"), std::string::npos) << message;
  EXPECT_EQ(second_wait(), ErrorKind::kState);
  EXPECT_EQ(stored.staged(), 0u);
  stored.expect_all(0, 300);
  stored.store->close();
}

TEST(Async, ReleasedReadsAreCancelledAndTheirMemoryComesBack) {
  Stored stored;
  for (const auto& drive : stored.drives) drive->add_rule(kHoldReads);
  const int64_t ticket = stored.start(range(0, 100), Purpose::kPrefetch).ticket;
  EXPECT_GT(stored.staged(), 0u);
  stored.store->release_ticket(ticket);  // would wait for ever
  EXPECT_EQ(stored.staged(), 0u);
  for (const auto& drive : stored.drives) drive->clear_rules();
  stored.expect_all(0, 300);
}

TEST(Async, MemoryOfReadsThatHangComesBackWhenTheyEnd) {
  for (const bool timed_out : {false, true}) {
    Stored stored({}, std::chrono::milliseconds(50));
    FaultRule hang = kHoldReads;
    hang.cancellable = false;
    hang.count = 1;
    for (const auto& drive : stored.drives) drive->add_rule(hang);
    const int64_t ticket = stored.start(range(0, 300)).ticket;
    if (timed_out) {
      // Some entries have one copy, and its drive does not answer.
      EXPECT_EQ(kind_of([&] {
                  while (wait(*stored.store, ticket).more) {
                  }
                }),
                ErrorKind::kStorage);
    } else {
      stored.store->release_ticket(ticket);
    }
    const uint64_t lost = stored.staged();
    EXPECT_GT(lost, 0u);
    stored.expect_all(0, 300);  // the rest of the arena serves
    EXPECT_EQ(stored.staged(), lost);
    for (const auto& drive : stored.drives) drive->clear_rules();
    while (stored.staged() > 0) stored.expect_all(0, 10);
    stored.store->close();
  }
}

TEST(Async, SequencesAreFreedWhileTheyAreRead) {
  Stored stored;
  for (const auto& drive : stored.drives) drive->add_rule(kHoldReads);
  const auto early = stored.start(range(0, 100), Purpose::kPrefetch);
  const auto late = submit(*stored.store, {{{stored.segment}, {}, range(50, 150), 300}},
                           Purpose::kDecode, early.ticket);
  stored.store->free_segment(stored.segment);
  EXPECT_EQ(kind_of([&] { stored.start({0}); }), ErrorKind::kState);
  EXPECT_EQ(number_in(stored.store->stats(), "stored_entries"), 300u);
  for (const auto& drive : stored.drives) drive->clear_rules();
  const auto seen = receive(*stored.store, Pattern{}, late);
  EXPECT_EQ(seen[0].size(), 100u);
  EXPECT_TRUE(all_right(seen[0]));
  EXPECT_EQ(number_in(stored.store->stats(), "stored_entries"), 0u);
  stored.store->close();
}

TEST(Async, ABudgetOfZeroIsRefused) {
  Stored stored;  // its drives are open
  StoreOptions options;
  options.staging_bytes = 1 << 20;
  options.model = {1e-5, 1e-9};
  std::vector<std::shared_ptr<io::BlockDevice>> drives(stored.drives.begin(), stored.drives.end());
  std::string message;
  EXPECT_EQ(kind_of([&] { Store(options, drives); }, &message), ErrorKind::kCapacity);
  EXPECT_NE(message.find("dram_bytes"), std::string::npos) << message;
}

TEST(Async, MoreRowsThanTheArenaHoldsComeInRounds) {
  StoreOptions options;
  options.staging_bytes = 64 << 10;
  Stored stored(options);
  std::vector<Ask> asks;
  for (int64_t row = 0; row < 40; ++row) {
    asks.push_back({{stored.segment}, {}, range(row * 5, row * 5 + 100), 300});
  }
  const auto seen =
      receive(*stored.store, Pattern{}, submit(*stored.store, asks, Purpose::kDecode));
  for (int64_t row = 0; row < 40; ++row) {
    EXPECT_EQ(seen[row].size(), 100u);
    EXPECT_TRUE(all_right(seen[row]));
  }
  EXPECT_EQ(stored.staged(), 0u);
}

}  // namespace
}  // namespace swarm_kv
