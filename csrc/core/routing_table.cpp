#include "core/routing_table.h"

#include <limits>
#include <string>

#include "io/error.h"

namespace swarm_kv {
namespace {

[[noreturn]] void fail(const std::string& message) {
  throw Error(ErrorKind::kArgument, "routing table: " + message);
}

void check_shapes(const Clusters& clusters, int64_t num_entries) {
  constexpr size_t kMax = std::numeric_limits<int32_t>::max();
  const size_t members = clusters.members.size();
  if (num_entries < 0 || static_cast<size_t>(num_entries) > kMax) {
    fail("num_entries must be in [0, 2^31), got " + std::to_string(num_entries));
  }
  if (members > kMax) fail("at most 2^31 - 1 copies fit, got " + std::to_string(members));
  if (clusters.offsets.empty() || clusters.offsets.front() != 0 || clusters.loose() < 0) {
    fail("cluster offsets must run from 0 to at most " + std::to_string(members));
  }
  for (int64_t c = 0; c < clusters.count(); ++c) {
    if (clusters.size(c) < 1) fail("cluster " + std::to_string(c) + " is empty");
  }
}

}  // namespace

RoutingTable::RoutingTable(const Clusters& clusters, int64_t num_entries)
    : num_entries_(num_entries) {
  check_shapes(clusters, num_entries);
  offsets_.assign(num_entries + 1, 0);
  const auto count_member = [&](int64_t position, const std::string& where) {
    const int64_t entry = clusters.members[position];
    if (entry < 0 || entry >= num_entries) {
      fail("member " + std::to_string(entry) + " of " + where + " is not in [0, " +
           std::to_string(num_entries) + ")");
    }
    return ++offsets_[entry + 1];
  };
  std::vector<int32_t> last_cluster(num_entries, -1);
  for (int64_t c = 0; c < clusters.count(); ++c) {
    const std::string where = "cluster " + std::to_string(c);
    for (int64_t p = clusters.offsets[c]; p < clusters.offsets[c + 1]; ++p) {
      count_member(p, where);
      int32_t& last = last_cluster[clusters.members[p]];
      if (last == c) {
        fail(where + " holds entry " + std::to_string(clusters.members[p]) + " twice");
      }
      last = static_cast<int32_t>(c);
    }
  }
  for (int64_t p = clusters.offsets.back(); p < static_cast<int64_t>(clusters.members.size());
       ++p) {
    if (count_member(p, "the loose entries") > 1) {
      fail("loose entry " + std::to_string(clusters.members[p]) +
           " has another copy: it may be in no cluster and loose only once");
    }
  }
  for (int64_t entry = 0; entry < num_entries; ++entry) {
    if (offsets_[entry + 1] == 0) {
      fail("entry " + std::to_string(entry) + " is in no cluster and not loose");
    }
    offsets_[entry + 1] += offsets_[entry];
  }
  positions_.resize(clusters.members.size());
  std::vector<int32_t> next(offsets_.begin(), offsets_.end() - 1);
  for (size_t p = 0; p < positions_.size(); ++p) {
    positions_[next[clusters.members[p]]++] = static_cast<int32_t>(p);
  }
  if (positions_.size() == static_cast<size_t>(num_entries)) offsets_ = {};
}

std::span<const int32_t> RoutingTable::copies_of(int64_t entry) const {
  if (entry < 0 || entry >= num_entries()) {
    fail("entry " + std::to_string(entry) + " is not in [0, " + std::to_string(num_entries()) +
         ")");
  }
  if (offsets_.empty()) return std::span(positions_).subspan(entry, 1);
  return std::span(positions_).subspan(offsets_[entry], offsets_[entry + 1] - offsets_[entry]);
}

size_t RoutingTable::bytes() const {
  return sizeof(*this) + sizeof(int32_t) * (offsets_.capacity() + positions_.capacity());
}

}  // namespace swarm_kv
