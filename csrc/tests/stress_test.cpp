// The store under random decoding steps, cancellations and faults; see stress.h.
#include "tests/stress.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

namespace swarm_kv {
namespace {

namespace fs = std::filesystem;

std::unique_ptr<StressResult> stressed(const StressOptions& options) {
  auto result = std::make_unique<StressResult>();
  Stress(options, *result).run();
  for (const std::string& error : result->errors) ADD_FAILURE() << error;
  return result;
}

void expect_whole(const StressResult& result) {
  EXPECT_EQ(result.wrong, 0u);
  EXPECT_EQ(result.missing, 0u);
  EXPECT_EQ(result.avoidable, 0u);
  EXPECT_EQ(result.unnamed, 0u);
  EXPECT_EQ(result.leaks, std::vector<std::string>{});
}

TEST(Stress, TenThousandStepsWithFaults) {
  const auto result = stressed({});
  expect_whole(*result);
  EXPECT_EQ(result->steps, 10000u);
  EXPECT_GT(result->entries, 100000u);
  for (const auto* count : {&result->cancelled, &result->failures, &result->joins}) {
    EXPECT_GT(*count, 100u);
  }
  EXPECT_EQ(result->joins, result->leaves);
  EXPECT_GT(result->repaired, 100u);
  EXPECT_GT(result->short_reads, 100u);
  EXPECT_LT(result->slow_share.during, 0.8 * result->slow_share.before);
  EXPECT_GT(result->slow_share.after, 0.8 * result->slow_share.before);
}

TEST(Stress, ARouterThatDoesNotBalanceKeepsAskingTheSlowDrive) {
  const auto result = stressed({.steps = 6000, .router = "static"});
  expect_whole(*result);
  EXPECT_GT(result->slow_share.during, 0.8 * result->slow_share.before);
}

TEST(Stress, WithoutFaultsNothingFailsAndNothingIsRepaired) {
  const auto result = stressed({.steps = 2000, .faults = false});
  expect_whole(*result);
  EXPECT_GT(result->entries, 20000u);
  EXPECT_EQ(result->faults, 0u);
  EXPECT_EQ(result->failures, 0u);
  EXPECT_EQ(result->repaired, 0u);
}

TEST(Stress, WithoutChecksumsThePatternsShowTheCorruption) {
  const auto result = stressed({.steps = 2000, .verify = false});
  EXPECT_GT(result->wrong, 10u);
  EXPECT_EQ(result->missing, 0u);
  EXPECT_EQ(result->leaks, std::vector<std::string>{});
}

TEST(Stress, AForgottenTicketIsALeak) {
  const auto result = stressed({.steps = 100, .leak_a_ticket = true});
  std::string all;
  for (const std::string& leak : result->leaks) all += leak + "; ";
  for (const char* held : {"tickets: 0 before, 1 after", "staged_bytes", "stored_bytes"}) {
    EXPECT_NE(all.find(held), std::string::npos) << all;
  }
}

TEST(Stress, OverFilesThroughTheKernel) {
  std::string folder = fs::temp_directory_path() / "swarm_kv_stress_XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  StressOptions options{.steps = 2000, .engine = "auto"};
  for (int i = 0; i < Stress::kDrives; ++i) {
    options.paths.push_back(folder + "/" + std::to_string(i));
    fs::create_directory(options.paths.back());
  }
  const auto result = stressed(options);
  expect_whole(*result);
  EXPECT_GT(result->repaired, 10u);
  fs::remove_all(folder);
}

}  // namespace
}  // namespace swarm_kv
