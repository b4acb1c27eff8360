#include "core/router.h"

#include "core/rebalance.h"
#include "core/registry.h"

namespace swarm_kv {
namespace {

void take_first(std::span<Segment* const> segments, const WantedList& wanted,
                std::vector<int32_t>& chosen) {
  chosen.clear();
  for (const Wanted& entry : wanted.entries) {
    chosen.push_back(entry.position_in(*segments[entry.segment]));
  }
}

class Swarm : public Router {
 public:
  bool unites() const override { return true; }
  void route(std::span<Segment* const> segments, const WantedList& wanted, const DriveLoad& drives,
             std::vector<int32_t>& chosen) const override {
    take_first(segments, wanted, chosen);
    rebalance(segments, wanted, drives, chosen);
  }
};

class BalanceOnly : public Swarm {
 public:
  bool unites() const override { return false; }
};

class DedupOnly : public Router {
 public:
  bool unites() const override { return true; }
  void route(std::span<Segment* const> segments, const WantedList& wanted, const DriveLoad&,
             std::vector<int32_t>& chosen) const override {
    take_first(segments, wanted, chosen);
  }
};

class Static : public DedupOnly {
 public:
  bool unites() const override { return false; }
};

const Registry<Router>& registry() {
  static const Registry<Router> kRegistry(
      "router", {registered<Router, Swarm>("swarm"), registered<Router, Static>("static"),
                 registered<Router, DedupOnly>("dedup_only"),
                 registered<Router, BalanceOnly>("balance_only")});
  return kRegistry;
}

}  // namespace

std::unique_ptr<Router> make_router(const std::string& name) { return registry().make(name); }

}  // namespace swarm_kv
