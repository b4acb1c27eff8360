// Compiled without sanitizers, which it speaks to itself: what fibers share here is the machine,
// which orders nothing for ThreadSanitizer. SWARM_KV_SANITIZE_ADDRESS or _THREAD says which there
// is.
#include "ops/cuda/emulation/emulation.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <boost/context/detail/fcontext.hpp>
#include <exception>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/mix.h"

#if defined(SWARM_KV_SANITIZE_ADDRESS)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(SWARM_KV_SANITIZE_THREAD)
#include <sanitizer/tsan_interface.h>
#endif

namespace swarm_kv::cuda {
namespace emulation {
namespace {

using boost::context::detail::fcontext_t;
using boost::context::detail::jump_fcontext;
using boost::context::detail::make_fcontext;
using boost::context::detail::transfer_t;

constexpr unsigned kWarp = 32;
constexpr unsigned kMaxThreads = 1024;
constexpr size_t kStackBytes = 128 << 10;
constexpr size_t kSharedBytes = size_t{1} << 30;  // of address space, for all blocks of a launch
constexpr size_t kBlockSharedBytes = 227 << 10;   // what an H100 has
constexpr size_t kRedZone = 64;
constexpr int kMaxVariables = 64;

// Thrown in fibers whose block has failed, to leave their kernels.
struct Abandoned {};

[[noreturn]] void refuse(const std::string& what) {
  throw std::runtime_error("emulation: " + what);
}

std::string text(const Site& site) {
  return std::string(site.file_name()) + ":" + std::to_string(site.line());
}

void* map(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

// ---- the sanitizers, where they are there

void poison([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#if defined(SWARM_KV_SANITIZE_ADDRESS)
  __asan_poison_memory_region(memory, bytes);
#endif
}

void unpoison([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#if defined(SWARM_KV_SANITIZE_ADDRESS)
  __asan_unpoison_memory_region(memory, bytes);
#endif
}

// What happened before give(place) happened before what follows take(place).
void give([[maybe_unused]] void* place) {
#if defined(SWARM_KV_SANITIZE_THREAD)
  __tsan_release(place);
#endif
}

void take([[maybe_unused]] void* place) {
#if defined(SWARM_KV_SANITIZE_THREAD)
  __tsan_acquire(place);
#endif
}

// ---- fibers

enum class State { kIdle, kReady, kBarrier, kCollective };

struct Fiber {
  fcontext_t context = nullptr;  // where it stopped
  const void* stack = nullptr;   // lowest address
  size_t stack_bytes = 0;
  [[maybe_unused]] void* fake_stack = nullptr;  // AddressSanitizer's
  [[maybe_unused]] void* thread = nullptr;      // ThreadSanitizer's

  State state = State::kIdle;
  unsigned rank = 0;  // within the block
  uint3 index{};
  uint64_t priority = 0;
  Site site;
  // What it brings to the collective that it waits at, then what it gets.
  Collective kind{};
  unsigned mask = 0;
  unsigned source = 0;
  uint64_t value = 0;
};

struct Variable {
  const void* key;
  void* memory;
};

struct Machine {
  Fiber host;  // whoever calls run
  Fiber fibers[kMaxThreads];
  unsigned created = 0;
  Fiber* current = &host;
  uint64_t seed = 1;
  uint64_t state = 1;  // of the random numbers

  const std::function<void()>* kernel = nullptr;
  dim3 grid;
  dim3 block;
  uint3 block_index{};
  Fiber* by_rank[kMaxThreads];
  Fiber* ready[kMaxThreads];
  unsigned ready_count = 0;
  unsigned alive = 0;    // threads that have not returned
  unsigned arrived = 0;  // at the barrier
  Site barrier_site;
  uint64_t generation = 0;                      // barriers that were passed
  unsigned waiting[kMaxThreads / kWarp] = {};   // lanes at collectives, by warp
  uint64_t warp_generations[kMaxThreads] = {};  // warp barriers, of the first lane of the mask
  bool abandoned = false;
  std::exception_ptr error;

  std::byte* arena = nullptr;  // of shared memory
  size_t arena_used = 0;
  size_t block_used = 0;
  unsigned char* dynamic = nullptr;
  Variable variables[kMaxVariables];
  int variable_count = 0;

  // Places that order threads for ThreadSanitizer.
  char begin = 0;
  char end = 0;
  char fence = 0;
  char barriers[2] = {};  // taken in turns, so that a slow thread takes from its own one
  char warps[kMaxThreads][2] = {};
};

Machine machine;

uint64_t random_number() {
  machine.state += kMixStep;
  return mix(machine.state);
}

void jump(Fiber& to) {
  Fiber& from = *machine.current;
  if (&from == &to) return;
  machine.current = &to;
#if defined(SWARM_KV_SANITIZE_ADDRESS)
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_bytes);
#endif
#if defined(SWARM_KV_SANITIZE_THREAD)
  __tsan_switch_to_fiber(to.thread, __tsan_switch_to_fiber_no_sync);
#endif
  const transfer_t back = jump_fcontext(to.context, &from);
  static_cast<Fiber*>(back.data)->context = back.fctx;
#if defined(SWARM_KV_SANITIZE_ADDRESS)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

Fiber& take_ready() {
  unsigned chosen = 0;
  if (machine.seed % 2 == 0) {
    chosen = static_cast<unsigned>(random_number() % machine.ready_count);
  } else {
    for (unsigned i = 1; i < machine.ready_count; ++i) {
      if (machine.ready[i]->priority > machine.ready[chosen]->priority) chosen = i;
    }
  }
  Fiber& fiber = *machine.ready[chosen];
  machine.ready[chosen] = machine.ready[--machine.ready_count];
  return fiber;
}

void make_ready(Fiber& fiber) {
  fiber.state = State::kReady;
  machine.ready[machine.ready_count++] = &fiber;
}

// Runs another thread until this one is chosen again. The host is where a block ends, well or not.
void switch_away() {
  jump(machine.ready_count == 0 ? machine.host : take_ready());
  if (machine.abandoned) throw Abandoned();
}

// Where a fiber begins, and where it comes back to for the thread of the next block.
void live(transfer_t from) {
  static_cast<Fiber*>(from.data)->context = from.fctx;
  Fiber& self = *machine.current;
#if defined(SWARM_KV_SANITIZE_ADDRESS)
  const void* stack;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &stack, &bytes);
  if (from.data == &machine.host) {
    machine.host.stack = stack;
    machine.host.stack_bytes = bytes;
  }
#endif
  for (;;) {
    take(&machine.begin);
    try {
      (*machine.kernel)();
    } catch (const Abandoned&) {
    } catch (...) {
      machine.error = std::current_exception();
    }
    give(&machine.end);
    self.state = State::kIdle;
    --machine.alive;
    const bool stop = machine.ready_count == 0 || machine.error != nullptr;
    jump(stop ? machine.host : take_ready());
  }
}

void create_fibers(unsigned count) {
  for (; machine.created < count; ++machine.created) {
    Fiber& fiber = machine.fibers[machine.created];
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    auto* memory = static_cast<std::byte*>(map(kStackBytes + page));
    mprotect(memory, page, PROT_NONE);  // an overflow is a fault
    fiber.stack = memory + page;
    fiber.stack_bytes = kStackBytes;
    fiber.context = make_fcontext(memory + page + kStackBytes, kStackBytes, live);
#if defined(SWARM_KV_SANITIZE_THREAD)
    fiber.thread = __tsan_create_fiber(0);
#endif
  }
}

std::byte* take_arena(size_t bytes, size_t alignment) {
  machine.block_used += bytes;
  if (machine.block_used > kBlockSharedBytes) {
    refuse("a block has more than " + std::to_string(kBlockSharedBytes) +
           " bytes of shared memory");
  }
  const size_t first = (machine.arena_used + kRedZone + alignment - 1) / alignment * alignment;
  if (first + bytes + kRedZone > kSharedBytes) refuse("shared memory of all blocks is too much");
  std::byte* memory = machine.arena + first;
  poison(machine.arena + machine.arena_used, first - machine.arena_used);
  unpoison(memory, bytes);
  poison(memory + bytes, kRedZone);
  machine.arena_used = first + bytes;
  // NaN as float, out of every range as an index. Not memset, in which ThreadSanitizer would see a
  // write of this thread.
  for (volatile std::byte* at = memory; at != memory + bytes; ++at) *at = std::byte{0xff};
  return memory;
}

// Why no thread of the block can run.
std::string describe_hang() {
  std::string result = "threads wait for others that never come:";
  int named = 0;
  for (unsigned i = 0; i < machine.block.x; ++i) {
    const Fiber& fiber = machine.fibers[i];
    if (fiber.state == State::kIdle || named++ >= 4) continue;
    result += " thread " + std::to_string(fiber.rank) + " at " +
              (fiber.state == State::kBarrier ? "the barrier" : "the collective") + " in " +
              text(fiber.site) + ";";
  }
  return result + " of " + std::to_string(machine.block.x) + " threads, " +
         std::to_string(machine.block.x - machine.alive) + " have returned";
}

void run_block(unsigned number, size_t shared) {
  machine.block_index = {number % machine.grid.x, number / machine.grid.x % machine.grid.y,
                         number / machine.grid.x / machine.grid.y};
  machine.block_used = 0;
  machine.variable_count = 0;
  machine.dynamic =
      shared == 0 ? nullptr : reinterpret_cast<unsigned char*>(take_arena(shared, 16));
  const unsigned threads = machine.block.x;
  machine.alive = threads;
  machine.arrived = 0;
  machine.ready_count = 0;
  std::fill(machine.waiting, machine.waiting + kMaxThreads / kWarp, 0u);
  // Which fiber is which thread changes from block to block: ThreadSanitizer takes the threads of a
  // fiber for one.
  const unsigned shift = static_cast<unsigned>(random_number() % threads);
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = machine.fibers[i];
    fiber.rank = (i + shift) % threads;
    fiber.index = {fiber.rank, 0, 0};
    fiber.priority = random_number();
    machine.by_rank[fiber.rank] = &fiber;
    make_ready(fiber);
  }
  jump(take_ready());
  if (machine.alive == 0 && machine.error == nullptr) return;

  if (machine.error == nullptr) {
    machine.error = std::make_exception_ptr(std::runtime_error("emulation: " + describe_hang()));
  }
  // The fibers that stand in the middle of a kernel leave it; those that did not begin return at
  // once.
  machine.abandoned = true;
  static const std::function<void()> nothing = [] {};
  machine.kernel = &nothing;
  machine.ready_count = 0;
  for (unsigned i = 0; i < threads; ++i) {
    while (machine.fibers[i].state != State::kIdle) jump(machine.fibers[i]);
  }
  machine.abandoned = false;
}

unsigned lane_of(const Fiber& fiber) { return fiber.rank % kWarp; }

uint64_t reduce(Collective kind, uint64_t a, uint64_t b) {
  const auto x = static_cast<uint32_t>(a), y = static_cast<uint32_t>(b);
  const auto i = static_cast<int32_t>(x), j = static_cast<int32_t>(y);
  switch (kind) {
    case Collective::kAdd:
      return x + y;
    case Collective::kMinSigned:
      return static_cast<uint32_t>(std::min(i, j));
    case Collective::kMaxSigned:
      return static_cast<uint32_t>(std::max(i, j));
    case Collective::kMin:
      return std::min(x, y);
    case Collective::kMax:
      return std::max(x, y);
    case Collective::kAnd:
      return x & y;
    default:
      return x | y;
  }
}

template <typename T>
void multiply(Fiber* const* lanes) {
  constexpr int kRows = 16, kColumns = 8, kInner = 16;
  float a[kRows][kInner], b[kInner][kColumns];
  const auto at = [&](unsigned lane) { return *from_word<const Fragments*>(lanes[lane]->value); };
  const auto half = [](const uint32_t* registers, int i) {
    return T::decode(static_cast<uint16_t>(registers[i / 2] >> 16 * (i % 2)));
  };
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    const int g = static_cast<int>(lane / 4), t = static_cast<int>(lane % 4);
    for (int i = 0; i < 8; ++i) {
      a[g + i / 2 % 2 * 8][2 * t + i % 2 + i / 4 * 8] = half(at(lane).a, i);
    }
    for (int i = 0; i < 4; ++i) b[2 * t + i % 2 + i / 2 * 8][g] = half(at(lane).b, i);
  }
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    const int g = static_cast<int>(lane / 4), t = static_cast<int>(lane % 4);
    for (int i = 0; i < 4; ++i) {
      float sum = at(lane).d[i];
      for (int k = 0; k < kInner; ++k) sum += a[g + i / 2 * 8][k] * b[k][2 * t + i % 2];
      at(lane).d[i] = sum;
    }
  }
}

// `lanes` are the warp's fibers.
void complete(Collective kind, unsigned mask, Fiber* const* lanes) {
  if (kind == Collective::kSync) return;
  if (kind == Collective::kMultiplyHalf) return multiply<Half>(lanes);
  if (kind == Collective::kMultiplyBFloat16) return multiply<BFloat16>(lanes);
  uint64_t values[kWarp] = {};
  uint64_t all = 0;
  bool first = true;
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    values[lane] = lanes[lane]->value;
    if (kind == Collective::kBallot) {
      all |= values[lane] << lane;
    } else if (kind != Collective::kShuffle) {
      all = first ? values[lane] : reduce(kind, all, values[lane]);
    }
    first = false;
  }
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    const unsigned source = lanes[lane]->source;
    if (kind == Collective::kShuffle && (mask >> source & 1) == 0) {
      refuse("a shuffle in " + text(lanes[lane]->site) + " reads lane " + std::to_string(source) +
             ", which takes no part");
    }
    lanes[lane]->value = kind == Collective::kShuffle ? values[source] : all;
  }
}

}  // namespace

void set_seed(uint64_t seed) {
  machine.seed = seed;
  machine.state = mix(seed);
}

void run(dim3 blocks, unsigned threads, size_t shared, const std::function<void()>& kernel) {
  if (threads == 0 || threads > kMaxThreads || threads % kWarp != 0) {
    refuse(std::to_string(threads) + " threads per block; must be whole warps, at most " +
           std::to_string(kMaxThreads));
  }
  if (blocks.x == 0 || blocks.y == 0 || blocks.z == 0 || blocks.y > 65535 || blocks.z > 65535) {
    refuse("a grid of " + std::to_string(blocks.x) + " x " + std::to_string(blocks.y) + " x " +
           std::to_string(blocks.z) + " blocks");
  }
  if (machine.arena == nullptr) machine.arena = static_cast<std::byte*>(map(kSharedBytes));
  create_fibers(threads);
#if defined(SWARM_KV_SANITIZE_THREAD)
  machine.host.thread = __tsan_get_current_fiber();
#endif
  machine.grid = blocks;
  machine.block = dim3(threads);
  machine.arena_used = 0;
  machine.error = nullptr;
  give(&machine.begin);

  std::vector<unsigned> order(size_t{blocks.x} * blocks.y * blocks.z);
  std::iota(order.begin(), order.end(), 0u);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random_number() % i]);
  for (const unsigned number : order) {
    machine.kernel = &kernel;
    run_block(number, shared);
    if (machine.error != nullptr) break;
  }
  machine.current = &machine.host;
  take(&machine.end);
  if (machine.error != nullptr) std::rethrow_exception(std::exchange(machine.error, nullptr));
}

const uint3& thread_index() { return machine.current->index; }
const uint3& block_index() { return machine.block_index; }
const dim3& block_size() { return machine.block; }
const dim3& grid_size() { return machine.grid; }

void yield() {
  make_ready(*machine.current);
  switch_away();
}

void barrier(const Site& site) {
  Fiber& self = *machine.current;
  self.site = site;
  if (machine.arrived == 0) {
    machine.barrier_site = site;
  } else if (machine.barrier_site.line() != site.line() ||
             std::strcmp(machine.barrier_site.file_name(), site.file_name()) != 0) {
    refuse("threads of a block wait at different barriers, in " + text(site) + " and " +
           text(machine.barrier_site));
  }
  char* place = &machine.barriers[machine.generation % 2];
  give(place);
  if (++machine.arrived == machine.block.x) {
    machine.arrived = 0;
    ++machine.generation;
    for (unsigned i = 0; i < machine.block.x; ++i) {
      if (machine.fibers[i].state == State::kBarrier) make_ready(machine.fibers[i]);
    }
    make_ready(self);
  } else {
    self.state = State::kBarrier;
  }
  switch_away();
  take(place);
}

uint64_t collective(Collective kind, unsigned mask, uint64_t value, unsigned source,
                    const Site& site) {
  Fiber& self = *machine.current;
  self.site = site;
  self.kind = kind;
  self.mask = mask;
  self.value = value;
  self.source = source;
  if ((mask >> lane_of(self) & 1) == 0) refuse("a lane is not in its own mask, in " + text(site));
  const unsigned first = self.rank / kWarp * kWarp;
  Fiber* const* lanes = machine.by_rank + first;
  unsigned& waiting = machine.waiting[self.rank / kWarp];
  // Of those that wait, whoever is in the mask waits for the same collective.
  if (const unsigned others = waiting & mask; others != 0) {
    const Fiber& other = *lanes[std::countr_zero(others)];
    if (other.kind != kind || other.mask != mask) {
      refuse("lanes of a warp wait at different collectives, in " + text(site) + " and " +
             text(other.site));
    }
  }
  const unsigned leader = first + std::countr_zero(mask);
  char* place = &machine.warps[leader][machine.warp_generations[leader] % 2];
  if (kind == Collective::kSync) give(place);
  waiting |= 1u << lane_of(self);
  self.state = State::kCollective;
  if ((waiting & mask) == mask) {
    waiting &= ~mask;
    if (kind == Collective::kSync) ++machine.warp_generations[leader];
    complete(kind, mask, lanes);
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if ((mask >> lane & 1) != 0) make_ready(*lanes[lane]);
    }
  }
  switch_away();
  if (kind == Collective::kSync) take(place);
  return self.value;
}

void* shared_memory(const void* key, size_t bytes, size_t alignment) {
  for (int i = 0; i < machine.variable_count; ++i) {
    if (machine.variables[i].key == key) return machine.variables[i].memory;
  }
  if (machine.variable_count == kMaxVariables) refuse("too many variables in shared memory");
  void* memory = take_arena(bytes, alignment);
  machine.variables[machine.variable_count++] = {key, memory};
  return memory;
}

unsigned char* dynamic_shared() { return machine.dynamic; }

}  // namespace emulation

void device_check(bool condition, const char* what) {
  if (!condition) emulation::refuse(what);
}

}  // namespace swarm_kv::cuda

void __threadfence() {
  using namespace swarm_kv::cuda::emulation;
  take(&machine.fence);
  give(&machine.fence);
}
