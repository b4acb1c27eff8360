// Ten thousand decoding steps over drives that fail and slow down: what went wrong, as JSON.
//   stress_bench [--steps N] [PATH PATH PATH PATH]   four directories; in memory without them
#include "tests/stress.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>

int main(int count, char** arguments) {
  swarm_kv::StressOptions options;
  for (int i = 1; i < count; ++i) {
    if (std::strcmp(arguments[i], "--steps") == 0 && i + 1 < count) {
      options.steps = std::atoll(arguments[++i]);
    } else {
      options.paths.emplace_back(arguments[i]);
    }
  }
  if (!options.paths.empty()) options.engine = "auto";
  if (options.steps < 1 || options.paths.size() % swarm_kv::Stress::kDrives != 0) {
    std::fprintf(stderr, "usage: stress_bench [--steps N] [PATH PATH PATH PATH]\n");
    return 2;
  }
  swarm_kv::StressResult result;
  try {
    swarm_kv::Stress(options, result).run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  for (const auto& list : {result.leaks, result.errors}) {
    for (const std::string& line : list) std::fprintf(stderr, "%s\n", line.c_str());
  }
  const auto number = [](const char* name, uint64_t value) {
    std::printf("\"%s\": %llu, ", name, static_cast<unsigned long long>(value));
  };
  std::printf("{");
  number("steps", result.steps);
  number("joins", result.joins);
  number("cancelled", result.cancelled);
  number("entries", result.entries);
  number("wrong", result.wrong);
  number("missing", result.missing);
  number("failures", result.failures);
  number("avoidable", result.avoidable);
  number("unnamed", result.unnamed);
  number("faults", result.faults);
  number("short_reads", result.short_reads);
  number("repaired", result.repaired);
  number("refused", result.refused);
  number("leaks", result.leaks.size());
  number("errors", result.errors.size());
  const swarm_kv::DriveShare& share = result.slow_share;
  std::printf("\"slow_share\": {\"before\": %.6f, \"during\": %.6f, \"after\": %.6f}}\n",
              share.before, share.during, share.after);
  return 0;
}
