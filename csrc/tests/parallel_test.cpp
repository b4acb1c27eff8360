#include "core/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "io/error.h"

namespace swarm_kv {
namespace {

class ParallelFor : public ::testing::Test {
 protected:
  void TearDown() override { set_num_threads(threads_); }

 private:
  const int threads_ = num_threads();
};

TEST_F(ParallelFor, VisitsEveryIndexOnce) {
  for (const int threads : {1, 2, 5}) {
    set_num_threads(threads);
    for (const int64_t count : {1, 2, 9, 10, 11, 1000}) {
      std::vector<int> visits(count, 0);
      parallel_for(-5, count - 5, 10, [&](int64_t first, int64_t last) {
        EXPECT_EQ((first + 5) % 10, 0);
        EXPECT_LE(last - first, 10);
        for (int64_t i = first; i < last; ++i) ++visits[i + 5];
      });
      EXPECT_EQ(visits, std::vector<int>(count, 1));
    }
  }
}

TEST_F(ParallelFor, EmptyRangeCallsNothing) {
  parallel_for(3, 3, 1, [](int64_t, int64_t) { FAIL(); });
  parallel_for(3, 2, 1, [](int64_t, int64_t) { FAIL(); });
}

// Each of two bodies waits for the other, which only threads that run at once survive.
bool bodies_meet(int threads, std::chrono::milliseconds patience) {
  set_num_threads(threads);
  std::atomic<int> arrived{0};
  std::atomic<bool> met{true};
  parallel_for(0, 2, 1, [&](int64_t, int64_t) {
    ++arrived;
    const auto deadline = std::chrono::steady_clock::now() + patience;
    while (arrived < 2 && met) {
      if (std::chrono::steady_clock::now() > deadline) met = false;
      std::this_thread::yield();
    }
  });
  return met;
}

TEST_F(ParallelFor, RunsAtOnce) { EXPECT_TRUE(bodies_meet(2, std::chrono::seconds(20))); }

TEST_F(ParallelFor, OneThreadRunsInTurn) {
  EXPECT_FALSE(bodies_meet(1, std::chrono::milliseconds(20)));
}

TEST_F(ParallelFor, PropagatesTheExceptionAndStops) {
  for (const int threads : {1, 3}) {
    set_num_threads(threads);
    std::atomic<int64_t> calls{0};
    try {
      parallel_for(0, 1000000, 1, [&](int64_t first, int64_t) {
        ++calls;
        if (first == 7) throw std::runtime_error("seven");
      });
      FAIL() << "no exception";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "seven");
    }
    EXPECT_LT(calls, 1000000);
  }
  int64_t calls = 0;
  set_num_threads(1);
  parallel_for(0, 4, 1, [&](int64_t, int64_t) { ++calls; });
  EXPECT_EQ(calls, 4);
}

TEST_F(ParallelFor, NestedCallStaysOnItsThread) {
  set_num_threads(3);
  std::atomic<int64_t> sum{0};
  parallel_for(0, 3, 1, [&](int64_t, int64_t) {
    const std::thread::id thread = std::this_thread::get_id();
    parallel_for(0, 10, 1, [&](int64_t first, int64_t) {
      EXPECT_EQ(std::this_thread::get_id(), thread);
      sum += first;
    });
  });
  EXPECT_EQ(sum, 3 * 45);
  EXPECT_TRUE(bodies_meet(2, std::chrono::seconds(20)));  // nesting is over
}

TEST_F(ParallelFor, RejectsBadArguments) {
  EXPECT_THROW(set_num_threads(0), Error);
  EXPECT_THROW(set_num_threads(-1), Error);
  EXPECT_THROW(parallel_for(0, 1, 0, [](int64_t, int64_t) {}), Error);
  set_num_threads(4);
  EXPECT_EQ(num_threads(), 4);
}

}  // namespace
}  // namespace swarm_kv
