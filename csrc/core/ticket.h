#pragma once

#include <chrono>
#include <cstdint>

#include "core/store.h"
#include "io/error.h"

namespace swarm_kv {

// A fetch that ends with the scope, whatever is in flight then.
class Ticket {
 public:
  Ticket(Store& store, int64_t id) : store_(store), id_(id) {}
  ~Ticket() {
    try {
      store_.release_ticket(id_);
    } catch (const Error&) {  // a wait that failed has released it already
    }
  }
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  bool wait(Delivery& arrived) const { return store_.wait(id_, arrived); }

 private:
  Store& store_;
  const int64_t id_;
};

// Seconds that a step took to start its reads, and to wait for them.
struct FetchSeconds {
  double submitting = 0;
  double waiting = 0;

  static double since(std::chrono::steady_clock::time_point begin) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
};

}  // namespace swarm_kv
