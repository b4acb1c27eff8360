#include "core/router.h"

#include <algorithm>
#include <numeric>
#include <unordered_set>

#include "core/registry.h"

namespace swarm_kv {
namespace {

class Static : public Router {
 public:
  std::vector<int32_t> route(const std::vector<Segment*>&, const WantedList& wanted,
                             const std::vector<io::DeviceModel>&) const override {
    std::vector<int32_t> chosen;
    chosen.reserve(wanted.entries.size());
    for (const Wanted& entry : wanted.entries) {
      chosen.push_back(wanted.candidates[entry.first_candidate].position);
    }
    return chosen;
  }
};

class Swarm : public Router {
 public:
  std::vector<int32_t> route(const std::vector<Segment*>& segments, const WantedList& wanted,
                             const std::vector<io::DeviceModel>& drives) const override {
    const size_t count = wanted.entries.size();
    std::vector<int32_t> replication(count);
    for (size_t i = 0; i < count; ++i) {
      const Wanted& entry = wanted.entries[i];
      const auto& drive_of = segments[entry.segment]->placement.drive;
      const Candidate* candidates = &wanted.candidates[entry.first_candidate];
      for (int32_t c = 0; c < entry.candidates; ++c) {
        bool seen = false;
        for (int32_t before = 0; before < c && !seen; ++before) {
          seen = drive_of[candidates[before].position] == drive_of[candidates[c].position];
        }
        replication[i] += !seen;
      }
    }
    std::vector<int32_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return replication[a] < replication[b]; });

    std::vector<double> busy(drives.size(), 0.0);
    std::unordered_set<uint64_t> open_shares;  // shares that some entry is read from already
    open_shares.reserve(count);
    std::vector<int32_t> chosen(count);
    for (const int32_t i : order) {
      const Wanted& entry = wanted.entries[i];
      const Segment& segment = *segments[entry.segment];
      const auto drive_of = [&](const Candidate& copy) {
        return segment.placement.drive[copy.position];
      };
      const auto key_of = [&](const Candidate& copy) {
        return (static_cast<uint64_t>(entry.segment) << 48) ^
               (static_cast<uint64_t>(copy.group) << 8) ^ drive_of(copy);
      };
      // The first entry of a share pays for the request, the rest of the share rides along.
      const auto cost_of = [&](const Candidate& copy) {
        const uint64_t requests = open_shares.contains(key_of(copy)) ? 0 : 1;
        return drives[drive_of(copy)].seconds(requests, segment.entry_bytes);
      };
      Candidate best = wanted.candidates[entry.first_candidate];
      if (entry.candidates > 1) {
        const auto finish = [&](const Candidate& copy) {
          return std::pair(busy[drive_of(copy)] + cost_of(copy), drive_of(copy));
        };
        for (int32_t c = 1; c < entry.candidates; ++c) {
          const Candidate& copy = wanted.candidates[entry.first_candidate + c];
          if (finish(copy) < finish(best)) best = copy;
        }
      }
      busy[drive_of(best)] += cost_of(best);
      open_shares.insert(key_of(best));
      chosen[i] = best.position;
    }
    return chosen;
  }
};

const Registry<Router>& registry() {
  static const Registry<Router> kRegistry(
      "router", {registered<Router, Swarm>("swarm"), registered<Router, Static>("static")});
  return kRegistry;
}

}  // namespace

std::unique_ptr<Router> make_router(const std::string& name) { return registry().make(name); }

}  // namespace swarm_kv
