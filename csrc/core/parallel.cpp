#include "core/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "io/error.h"

namespace swarm_kv {
namespace {

std::atomic<int> g_num_threads{0};  // 0: not set, use the hardware's
thread_local bool t_inside_parallel_for = false;

// The work of one parallel_for call, shared by its threads.
class ChunkQueue {
 public:
  ChunkQueue(int64_t begin, int64_t end, int64_t grain,
             const std::function<void(int64_t, int64_t)>& body)
      : begin_(begin),
        end_(end),
        grain_(grain),
        chunks_((end - begin - 1) / grain + 1),
        body_(body) {}

  int64_t chunks() const { return chunks_; }

  void work() {
    const bool outer = t_inside_parallel_for;
    t_inside_parallel_for = true;
    try {
      for (int64_t chunk; (chunk = next_.fetch_add(1)) < chunks_;) {
        const int64_t first = begin_ + chunk * grain_;
        body_(first, first + std::min(grain_, end_ - first));
      }
    } catch (...) {
      next_.store(chunks_);
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
    t_inside_parallel_for = outer;
  }

  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const int64_t begin_;
  const int64_t end_;
  const int64_t grain_;
  const int64_t chunks_;
  const std::function<void(int64_t, int64_t)>& body_;
  std::atomic<int64_t> next_{0};
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace

int num_threads() {
  const int threads = g_num_threads.load();
  if (threads > 0) return threads;
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void set_num_threads(int threads) {
  if (threads < 1) {
    throw Error(ErrorKind::kArgument,
                "the number of threads must be at least 1, got " + std::to_string(threads));
  }
  g_num_threads.store(threads);
}

void parallel_for(int64_t begin, int64_t end, int64_t grain,
                  const std::function<void(int64_t, int64_t)>& body) {
  if (grain < 1) {
    throw Error(ErrorKind::kArgument,
                "parallel_for: grain must be at least 1, got " + std::to_string(grain));
  }
  if (begin >= end) return;
  ChunkQueue queue(begin, end, grain, body);
  const int64_t threads =
      t_inside_parallel_for ? 1 : std::min<int64_t>(num_threads(), queue.chunks());
  {
    std::vector<std::jthread> helpers;
    helpers.reserve(threads - 1);
    try {
      while (static_cast<int64_t>(helpers.size()) < threads - 1) {
        helpers.emplace_back([&queue] { queue.work(); });
      }
    } catch (const std::system_error&) {
      // No more threads to be had: those that did start, and this one, do the work.
    }
    queue.work();
  }
  queue.rethrow();
}

}  // namespace swarm_kv
