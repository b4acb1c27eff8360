// Times of the stages of a step and of the offline stage, on one thread. Options and JSON are those
// of Google Benchmark.
#include <benchmark/benchmark.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/cases/attend.h"
#include "bench/cases/cache.h"
#include "bench/cases/cluster.h"
#include "bench/cases/plan.h"
#include "bench/cases/read.h"
#include "bench/cases/score.h"
#include "bench/cases/select.h"
#include "core/parallel.h"

namespace swarm_kv::bench {
namespace {

// What memory gives at best: bytes are those read and those written.
class CopyMemory {
 public:
  explicit CopyMemory(int64_t bytes) : from_(bytes, 1), to_(bytes, 2) {}

  void run() {
    std::memcpy(to_.data(), from_.data(), from_.size());
    benchmark::ClobberMemory();
  }
  int64_t items() const { return static_cast<int64_t>(from_.size()); }
  int64_t bytes() const { return 2 * items(); }

 private:
  std::vector<char> from_, to_;
};

// The case is made when it is first measured and kept: every repetition calls the body anew.
template <typename Case, typename... Arguments>
void add(const std::string& name, Arguments... arguments) {
  auto kept = std::make_shared<std::optional<Case>>();
  benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) {
    if (!*kept) kept->emplace(arguments...);
    Case& measured = **kept;
    for (auto _ : state) measured.run();
    state.SetItemsProcessed(state.iterations() * measured.items());
    if (measured.bytes() > 0) state.SetBytesProcessed(state.iterations() * measured.bytes());
  });
}

std::string sized(const std::string& name, int64_t entries) {
  return name + "/" +
         (entries % 1024 == 0 ? std::to_string(entries / 1024) + "K" : std::to_string(entries));
}

void add_all() {
  constexpr int64_t kSizes[] = {8 << 10, 128 << 10};
  add<CopyMemory>("copy/32 MiB", int64_t{32} << 20);
  for (const int64_t entries : kSizes) {
    add<Plan>(sized("plan/intervals", entries), entries, Layout::kIntervals);
    add<Plan>(sized("plan/replicas", entries), entries, Layout::kReplicas);
  }
  for (const char* policy : {"decayed_frequency", "lru", "arc"}) {
    for (const int64_t entries : kSizes) {
      add<Cache>(sized("cache/" + std::string(policy), entries), entries, int64_t{1024}, policy);
    }
  }
  for (const int64_t entries : kSizes) {
    add<ScoreCodes>(sized("score/codes", entries), entries);
    add<ScanNibbles>(sized("score/scan", entries), entries);
  }
  for (const int64_t medoids : {512, 8 << 10}) {
    add<ScoreMedoids>(sized("score/medoids, fp16", medoids), medoids);
    add<ScoreCodedMedoids>(sized("score/medoids, 4 bits", medoids), medoids);
  }
  for (const int64_t entries : kSizes) {
    add<SelectIntervals>(sized("select/intervals", entries), entries);
    add<SelectTwoLevel>(sized("select/two_level", entries), entries);
  }
  add<Fetch>("read/fetch/8K", int64_t{8} << 10);
  add<Checksum>("read/checksum/819", int64_t{819});
  add<Decode>("read/decode, int8/819", int64_t{819}, "int8");
  add<Decode>("read/decode, kivi4/819", int64_t{819}, "kivi4");
  add<SparseAttention<float>>("attend/9 over 3 x 64, fp32/819", int64_t{819}, Heads{9, 3, 64});
  add<SparseAttention<bf16>>("attend/32 over 8 x 64, bf16/819", int64_t{819}, Heads{32, 8, 64});
  for (const int64_t entries : {819, 13107}) {
    add<SparseAttention<bf16>>(sized("attend/32 over 8 x 128, bf16", entries), entries,
                               Heads{32, 8, 128});
  }
  add<MergeAttention>("attend/merge x 128/32", int64_t{32});
  add<Signatures>("cluster/signatures/8K", int64_t{8} << 10);
  add<Hypergraph>("cluster/hypergraph/8K", int64_t{8} << 10);
}

}  // namespace
}  // namespace swarm_kv::bench

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  swarm_kv::set_num_threads(1);
  swarm_kv::bench::add_all();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
