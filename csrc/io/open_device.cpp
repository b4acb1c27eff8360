#include "io/open_device.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <set>
#include <string>
#include <system_error>

#include "io/engine.h"
#include "io/error.h"
#include "io/gds_device.h"
#include "io/memory_device.h"
#include "io/simulated_device.h"
#include "io/thread_device.h"
#include "io/uring_device.h"

namespace swarm_kv::io {
namespace {

struct Engine {
  std::string_view name;
  EngineFactory open;
};

constexpr std::string_view kGds = "gds";

// The registry: a new engine is a file of its own and a line here.
constexpr std::array kEngines = {
    Engine{"io_uring", open_uring}, Engine{"threads", open_threads},     Engine{kGds, open_gds},
    Engine{"memory", open_memory},  Engine{"simulated", open_simulated},
};

constexpr std::string_view kAuto = "auto";
constexpr uint32_t kMaxDepth = 4096;
constexpr uint32_t kMaxThreads = 256;
constexpr uint32_t kMaxBlock = 1U << 20;

[[noreturn]] void reject(const std::string& text) { throw Error(ErrorKind::kArgument, text); }

std::string names_text() {
  std::string text(kAuto);
  for (const Engine& engine : kEngines) text.append(", ").append(engine.name);
  return text;
}

std::size_t index_of(std::string_view name) {
  for (std::size_t i = 0; i < kEngines.size(); ++i) {
    if (kEngines[i].name == name) return i;
  }
  reject("engine = \"" + std::string(name) + "\" is unknown; use one of " + names_text());
}

void check_range(std::string_view what, uint64_t value, uint64_t low, uint64_t high) {
  if (value >= low && value <= high) return;
  reject(std::string(what) + " = " + std::to_string(value) + " must be between " +
         std::to_string(low) + " and " + std::to_string(high));
}

void check(const DeviceOptions& options) {
  check_range("queue_depth", options.queue_depth, 1, kMaxDepth);
  check_range("threads", options.threads, 1, kMaxThreads);
  if (options.timeout.count() <= 0) {
    reject("timeout = " + std::to_string(options.timeout.count()) + " ms must be positive");
  }
  if (options.block != 0) {
    check_range("block", options.block, 512, kMaxBlock);
    if ((options.block & (options.block - 1)) != 0) {
      reject("block = " + std::to_string(options.block) + " must be a power of two");
    }
  }
  if (options.read_only && !options.path.starts_with("raw:")) {
    reject("read_only needs a raw: path, not '" + options.path + "'");
  }
}

// The engine that serves a drive, and why it is not the one that was asked for.
struct Choice {
  std::string engine;
  std::string note = {};
};

Choice choose(const DeviceOptions& options) {
  if (options.engine == kAuto) {
    const int error = UringQueue::probe();
    if (error == 0) return {"io_uring"};
    return {"threads", "io_uring cannot be used here (" + std::generic_category().message(error) +
                           ", errno " + std::to_string(error) +
                           "), engine \"threads\" reads and writes instead; in a container allow "
                           "the io_uring system calls in its seccomp profile, elsewhere set "
                           "kernel.io_uring_disabled to 0"};
  }
  if (options.engine == kGds) {
    const std::string obstacle = gds_obstacle(options);
    if (obstacle.empty()) return {options.engine};
    const std::string next = UringQueue::probe() == 0 ? "io_uring" : "threads";
    return {next, "GPUDirect Storage cannot be used here: " + obstacle + "; engine \"" + next +
                      "\" reads and writes instead"};
  }
  return {options.engine};
}

}  // namespace

std::vector<std::string_view> engine_names() {
  std::vector<std::string_view> names;
  for (const Engine& engine : kEngines) names.push_back(engine.name);
  return names;
}

std::vector<std::shared_ptr<BlockDevice>> open_devices(const std::vector<DeviceOptions>& options,
                                                       bool shared_ring) {
  std::vector<DeviceOptions> resolved = options;
  std::vector<std::size_t> engines;
  std::array<EngineContext, kEngines.size()> contexts;
  std::vector<std::string> notes;
  for (std::size_t i = 0; i < resolved.size(); ++i) {
    DeviceOptions& each = resolved[i];
    check(each);
    Choice choice = choose(each);
    each.engine = std::move(choice.engine);
    notes.push_back(std::move(choice.note));
    if (each.label.empty()) {
      each.label = each.path.empty() ? each.engine + "#" + std::to_string(i) : each.path;
    }
    engines.push_back(index_of(each.engine));
    EngineContext& context = contexts[engines.back()];
    context.shared_ring = shared_ring;
    context.total_depth += each.queue_depth;
    ++context.devices;
  }
  std::vector<std::shared_ptr<BlockDevice>> devices;
  std::set<std::string> told = {""};
  for (std::size_t i = 0; i < resolved.size(); ++i) {
    devices.push_back(kEngines[engines[i]].open(resolved[i], contexts[engines[i]]));
    // On the first drive that it concerns: it holds for all.
    if (told.insert(notes[i]).second) devices.back()->note(notes[i]);
  }
  return devices;
}

}  // namespace swarm_kv::io
