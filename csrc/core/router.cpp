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
      chosen.push_back(wanted.candidates[entry.first_candidate]);
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
      const auto& copies = segments[entry.segment]->placement.copies;
      for (int32_t c = 0; c < entry.candidates; ++c) {
        const int32_t drive = copies[wanted.candidates[entry.first_candidate + c]].drive;
        bool seen = false;
        for (int32_t before = 0; before < c && !seen; ++before) {
          seen = copies[wanted.candidates[entry.first_candidate + before]].drive == drive;
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
      const auto key_of = [&](const Copy& copy) {
        return (static_cast<uint64_t>(entry.segment) << 48) ^
               (static_cast<uint64_t>(copy.cluster) << 8) ^ static_cast<uint64_t>(copy.drive);
      };
      // The first entry of a share pays for the request, the rest of the share rides along.
      const auto cost_of = [&](const Copy& copy) {
        const uint64_t requests = open_shares.contains(key_of(copy)) ? 0 : 1;
        return drives[copy.drive].seconds(requests, segment.entry_bytes);
      };
      int32_t best = wanted.candidates[entry.first_candidate];
      if (entry.candidates > 1) {
        const auto finish = [&](int32_t position) {
          const Copy& copy = segment.placement.copies[position];
          return std::pair(busy[copy.drive] + cost_of(copy), copy.drive);
        };
        for (int32_t c = 1; c < entry.candidates; ++c) {
          const int32_t position = wanted.candidates[entry.first_candidate + c];
          if (finish(position) < finish(best)) best = position;
        }
      }
      const Copy& copy = segment.placement.copies[best];
      busy[copy.drive] += cost_of(copy);
      open_shares.insert(key_of(copy));
      chosen[i] = best;
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
