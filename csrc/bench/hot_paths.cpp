// The five paths whose instructions are counted in CI (benchmarks/instructions.py). Every run does
// the same work: no threads, no clock, no I/O.
//   valgrind --tool=callgrind --instr-atstart=no hot_paths [--twice PATH]
// Each path is counted by itself and dumped under its name. Prints, as JSON, what else the counts
// depend on. --twice does one path's work twice: a change that the comparison must notice.
#include <gnu/libc-version.h>
#include <valgrind/callgrind.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "bench/cases/attend.h"
#include "bench/cases/cache.h"
#include "bench/cases/plan.h"
#include "bench/cases/score.h"
#include "bench/cases/select.h"
#include "core/simd.h"

namespace swarm_kv::bench {
namespace {

// What clones of functions (core/simd.h) and the C library choose their code by.
const char* level() {
#ifdef SWARM_KV_HAS_X86
  if (__builtin_cpu_supports("x86-64-v4")) return "x86-64-v4";
  if (__builtin_cpu_supports("x86-64-v3")) return "x86-64-v3";
#endif
  return "baseline";
}

template <typename Case, typename... Arguments>
void count(const char* name, const std::string& twice, Arguments... arguments) {
  Case counted(arguments...);
  counted.run();  // vectors grow and lists fill
  CALLGRIND_START_INSTRUMENTATION;
  CALLGRIND_ZERO_STATS;
  for (int i = name == twice ? 2 : 1; i > 0; --i) counted.run();
  CALLGRIND_DUMP_STATS_AT(name);
  CALLGRIND_STOP_INSTRUMENTATION;
}

void count_all(const std::string& twice) {
  constexpr int64_t kEntries = 8 << 10;
  count<Plan>("plan", twice, kEntries, Layout::kReplicas);
  count<Cache>("cache", twice, kEntries, 256, "decayed_frequency");
  count<ScoreCodes>("score", twice, kEntries);
  count<SelectIntervals>("select", twice, kEntries);
  count<SparseAttention<bf16>>("attend", twice, kEntries / 10, Heads{32, 8, 128});
}

}  // namespace
}  // namespace swarm_kv::bench

int main(int argc, char** argv) {
  if (argc != 1 && !(argc == 3 && std::strcmp(argv[1], "--twice") == 0)) {
    std::fprintf(stderr, "usage: %s [--twice PATH]\n", argv[0]);
    return 2;
  }
  swarm_kv::bench::count_all(argc == 3 ? argv[2] : "");
  std::printf("{\"compiler\": \"%s\", \"libc\": \"%s\", \"level\": \"%s\"}\n",
#ifdef __clang__
              "clang " __VERSION__,
#else
              "gcc " __VERSION__,
#endif
              gnu_get_libc_version(), swarm_kv::bench::level());
  return 0;
}
