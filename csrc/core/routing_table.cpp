#include "core/routing_table.h"

#include <limits>
#include <string>

#include "io/error.h"

namespace swarm_kv {
namespace {

[[noreturn]] void fail(const std::string& message) {
  throw Error(ErrorKind::kArgument, "routing table: " + message);
}

void check_shapes(const Clusters& clusters, const Placement& placement, int64_t num_entries) {
  constexpr size_t kMax = std::numeric_limits<int32_t>::max();
  const size_t members = clusters.members.size();
  if (num_entries < 0 || static_cast<size_t>(num_entries) > kMax) {
    fail("num_entries must be in [0, 2^31), got " + std::to_string(num_entries));
  }
  if (members > kMax) fail("at most 2^31 - 1 copies fit, got " + std::to_string(members));
  if (clusters.offsets.empty() || clusters.offsets.front() != 0 ||
      clusters.offsets.back() != static_cast<int64_t>(members)) {
    fail("cluster offsets must run from 0 to " + std::to_string(members));
  }
  for (int64_t c = 0; c < clusters.count(); ++c) {
    if (clusters.size(c) < 1) fail("cluster " + std::to_string(c) + " is empty");
  }
  if (placement.copies.size() != members) {
    fail("the clusters have " + std::to_string(members) + " members, the placement " +
         std::to_string(placement.copies.size()) + " copies");
  }
}

}  // namespace

RoutingTable::RoutingTable(const Clusters& clusters, const Placement& placement,
                           int64_t num_entries) {
  check_shapes(clusters, placement, num_entries);
  std::vector<int32_t> last_cluster(num_entries, -1);
  offsets_.assign(num_entries + 1, 0);
  for (int64_t c = 0; c < clusters.count(); ++c) {
    for (int64_t p = clusters.offsets[c]; p < clusters.offsets[c + 1]; ++p) {
      const int64_t entry = clusters.members[p];
      const Copy& copy = placement.copies[p];
      if (entry < 0 || entry >= num_entries) {
        fail("member " + std::to_string(entry) + " of cluster " + std::to_string(c) +
             " is not in [0, " + std::to_string(num_entries) + ")");
      }
      if (last_cluster[entry] == c) {
        fail("cluster " + std::to_string(c) + " holds entry " + std::to_string(entry) + " twice");
      }
      if (copy.cluster != c) {
        fail("copy " + std::to_string(p) + " names cluster " + std::to_string(copy.cluster) +
             " but belongs to cluster " + std::to_string(c));
      }
      if (copy.drive < 0 || static_cast<size_t>(copy.drive) >= placement.drive_bytes.size()) {
        fail("copy " + std::to_string(p) + " is on drive " + std::to_string(copy.drive) + " of " +
             std::to_string(placement.drive_bytes.size()));
      }
      last_cluster[entry] = static_cast<int32_t>(c);
      ++offsets_[entry + 1];
    }
  }
  for (int64_t entry = 0; entry < num_entries; ++entry) {
    if (offsets_[entry + 1] == 0) fail("entry " + std::to_string(entry) + " is in no cluster");
    offsets_[entry + 1] += offsets_[entry];
  }
  positions_.resize(clusters.members.size());
  std::vector<int32_t> next(offsets_.begin(), offsets_.end() - 1);
  for (size_t p = 0; p < positions_.size(); ++p) {
    positions_[next[clusters.members[p]]++] = static_cast<int32_t>(p);
  }
}

std::span<const int32_t> RoutingTable::copies_of(int64_t entry) const {
  if (entry < 0 || entry >= num_entries()) {
    fail("entry " + std::to_string(entry) + " is not in [0, " + std::to_string(num_entries()) +
         ")");
  }
  return std::span(positions_).subspan(offsets_[entry], offsets_[entry + 1] - offsets_[entry]);
}

size_t RoutingTable::bytes() const {
  return sizeof(*this) + sizeof(int32_t) * (offsets_.capacity() + positions_.capacity());
}

}  // namespace swarm_kv
