// What tests of the store share: drives that can be made to fail, and how to read from them.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/store.h"
#include "io/error.h"
#include "io/faulty_device.h"

namespace swarm_kv {

// Blocks of 8 neighbours, and every third entry once more in a cluster of far ones.
inline Clusters overlapping(int64_t entries) {
  Clusters clusters;
  const auto close = [&] { clusters.offsets.push_back(clusters.members.size()); };
  for (int64_t n = 0; n < entries; ++n) {
    clusters.members.push_back(n);
    if (n % 8 == 7 || n == entries - 1) close();
  }
  for (int64_t n = 0; n < entries; n += 3) {
    clusters.members.push_back(n);
    if (n % 30 == 27) close();
  }
  if (clusters.offsets.back() != static_cast<int64_t>(clusters.members.size())) close();
  return clusters;
}

inline std::vector<int64_t> range(int64_t first, int64_t last) {
  std::vector<int64_t> numbers;
  for (int64_t n = first; n < last; ++n) numbers.push_back(n);
  return numbers;
}

struct Rig {
  std::vector<std::shared_ptr<io::FaultyDevice>> drives;
  std::unique_ptr<Store> store;

  explicit Rig(int count = 3, StoreOptions options = {}, const std::string& engine = "memory",
               uint64_t capacity_limit = 0, std::chrono::milliseconds timeout = {}) {
    std::vector<io::DeviceOptions> devices(count);
    for (int i = 0; i < count; ++i) {
      devices[i].engine = engine;
      devices[i].label = "drive" + std::to_string(i);
      devices[i].capacity_limit = capacity_limit;
      if (timeout.count() > 0) devices[i].timeout = timeout;
    }
    std::vector<std::shared_ptr<io::BlockDevice>> wrapped;
    for (const auto& device : io::open_devices(devices)) {
      drives.push_back(std::make_shared<io::FaultyDevice>(device));
      wrapped.push_back(drives.back());
    }
    if (options.dram_bytes == 0) options.dram_bytes = 4 << 20;
    if (options.staging_bytes == 0) options.staging_bytes = 1 << 20;
    if (options.model.t_base == 0) options.model = {1e-5, 1e-9};
    store = std::make_unique<Store>(options, wrapped);
  }
};

// What one row of a fetch asks for, holding its lists.
struct Ask {
  std::vector<int64_t> segments, clusters, entries;
  int64_t limit;

  Row row() const { return {segments, clusters, entries, limit}; }
};

struct Submitted {
  int64_t ticket;
  Delivery resident;
};

inline Submitted submit(Store& store, const std::vector<Ask>& asks, Purpose purpose,
                        int64_t ahead = 0) {
  std::vector<Row> rows;
  for (const Ask& ask : asks) rows.push_back(ask.row());
  Submitted submitted;
  submitted.ticket = store.submit(rows, purpose, ahead, submitted.resident);
  return submitted;
}

struct Part {
  Delivery arrived;
  bool more;
};

inline Part wait(Store& store, int64_t ticket) {
  Part part;
  part.more = store.wait(ticket, part.arrived);
  return part;
}

// Per row: entry number -> its bytes are right, over all rounds. `data.matches(id, bytes)` says so.
using Seen = std::vector<std::map<int64_t, bool>>;

template <typename Data>
void take(Store& store, const Data& data, const Delivery& delivery, Seen& seen) {
  seen.resize(delivery.rows.size() - 1);
  for (size_t row = 0; row < seen.size(); ++row) {
    for (int64_t i = delivery.rows[row]; i < delivery.rows[row + 1]; ++i) {
      const int64_t id = delivery.ids[i];
      EXPECT_FALSE(seen[row].contains(id)) << "entry twice: " << id;
      seen[row][id] = data.matches(id, store.region()->data() + delivery.slots[i]);
    }
  }
}

template <typename Data>
Seen receive(Store& store, const Data& data, const Submitted& submitted, int* rounds = nullptr) {
  Seen seen;
  take(store, data, submitted.resident, seen);
  for (bool more = true; more;) {
    const Part round = wait(store, submitted.ticket);
    take(store, data, round.arrived, seen);
    more = round.more;
    if (rounds != nullptr) ++*rounds;
  }
  store.release_ticket(submitted.ticket);
  return seen;
}

template <typename Data>
std::map<int64_t, bool> fetch(Store& store, const Data& data, std::vector<int64_t> segments,
                              std::vector<int64_t> clusters, std::vector<int64_t> entries,
                              int64_t limit, Purpose purpose = Purpose::kDecode,
                              int* rounds = nullptr) {
  const std::vector<Ask> asks{{segments, clusters, entries, limit}};
  return receive(store, data, submit(store, asks, purpose), rounds)[0];
}

inline bool all_right(const std::map<int64_t, bool>& seen) {
  for (const auto& [entry, right] : seen) {
    if (!right) return false;
  }
  return true;
}

inline ErrorKind kind_of(const std::function<void()>& call, std::string* message = nullptr) {
  try {
    call();
  } catch (const Error& error) {
    if (message != nullptr) *message = error.what();
    return error.kind();
  }
  ADD_FAILURE() << "no error";
  return ErrorKind::kArgument;
}

// The first number called `key` behind the first occurrence of `object`.
inline uint64_t number_in(const std::string& stats, const std::string& key,
                          const std::string& object = "{") {
  const std::string name = "\"" + key + "\": ";
  return std::stoull(stats.substr(stats.find(name, stats.find(object)) + name.size()));
}

}  // namespace swarm_kv
