#include "ops/stores.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

namespace swarm_kv::ops {
namespace {

std::mutex g_mutex;
std::map<int64_t, std::shared_ptr<Store>> g_stores;
int64_t g_next = 1;

void check_count(const char* op, const char* name, size_t offsets, size_t rows) {
  check(offsets == rows + 1, op, ": `", name, "` holds ", offsets, " offsets, but `limits` names ",
        rows, " rows: ", rows + 1, " offsets are needed");
}

}  // namespace

int64_t add_store(std::shared_ptr<Store> store) {
  const std::lock_guard lock(g_mutex);
  g_stores[g_next] = std::move(store);
  return g_next++;
}

std::shared_ptr<Store> store_of(int64_t handle) {
  const std::lock_guard lock(g_mutex);
  const auto found = g_stores.find(handle);
  if (found == g_stores.end()) {
    throw Error(ErrorKind::kState,
                concat("store ", handle, " does not exist or was closed: open another one"));
  }
  return found->second;
}

void remove_store(int64_t handle) {
  const std::lock_guard lock(g_mutex);
  g_stores.erase(handle);
}

WantedRows::WantedRows(const char* op, std::vector<int64_t> segments,
                       const std::vector<int64_t>& segment_rows, const Tensor& clusters,
                       const Tensor& cluster_rows, const Tensor& entries, const Tensor& entry_rows,
                       const std::vector<int64_t>& limits)
    : segments_(std::move(segments)),
      clusters_(op, "clusters", clusters, "cluster_rows", cluster_rows),
      entries_(op, "entries", entries, "entry_rows", entry_rows) {
  check_count(op, "segment_rows", segment_rows.size(), limits.size());
  check_count(op, "cluster_rows", clusters_.count() + 1, limits.size());
  check_count(op, "entry_rows", entries_.count() + 1, limits.size());
  const auto total = static_cast<int64_t>(segments_.size());
  check(segment_rows.front() == 0 && segment_rows.back() == total &&
            std::ranges::is_sorted(segment_rows),
        op, ": `segment_rows` must ascend from 0 to the length of `segments`, ", total);
  rows_.reserve(limits.size());
  for (size_t r = 0; r < limits.size(); ++r) {
    const auto own = std::span<const int64_t>(segments_).subspan(
        segment_rows[r], segment_rows[r + 1] - segment_rows[r]);
    const auto row = static_cast<int64_t>(r);
    rows_.push_back({own, clusters_.row(row), entries_.row(row), limits[r]});
  }
}

}  // namespace swarm_kv::ops
