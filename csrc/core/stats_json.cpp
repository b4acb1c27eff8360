#include "core/stats_json.h"

#include <cmath>
#include <cstdio>
#include <sstream>

namespace swarm_kv {
namespace {

// Writes {"key": value, ...}; numbers and nested text only, so no general JSON library is needed.
class Object {
 public:
  Object() {
    out_.precision(17);
    out_ << '{';
  }

  template <typename Number>
  Object& number(const char* key, Number value) {
    separate(key) << value;
    return *this;
  }
  Object& seconds(const char* key, double value) {
    separate(key) << (std::isfinite(value) ? value : 0.0);
    return *this;
  }
  Object& raw(const char* key, const std::string& json) {
    separate(key) << json;
    return *this;
  }
  Object& text(const char* key, std::string_view value) {
    separate(key) << '"';
    for (const char c : value) {
      if (c == '"' || c == '\\') {
        out_ << '\\' << c;
      } else if (static_cast<unsigned char>(c) < 0x20) {
        char escaped[8];
        std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
        out_ << escaped;
      } else {
        out_ << c;
      }
    }
    out_ << '"';
    return *this;
  }
  std::string done() {
    out_ << '}';
    return out_.str();
  }

 private:
  std::ostream& separate(const char* key) {
    if (out_.tellp() > 1) out_ << ", ";
    return out_ << '"' << key << "\": ";
  }
  std::ostringstream out_;
};

std::string dram_json(const Budget& budget, const EntryPool& pool, int64_t cached_entries,
                      const Holdings& holdings) {
  return Object()
      .number("limit", budget.limit())
      .number("used", budget.used())
      .number("peak", budget.peak())
      .number("staging", budget.used(Use::kStaging))
      .number("staged_bytes", holdings.staged_bytes)
      .number("window", budget.used(Use::kWindow))
      .number("index", budget.used(Use::kIndex))
      .number("cache", budget.used(Use::kCache))
      .number("window_entries", pool.window_slots())
      .number("cached_entries", cached_entries)
      .done();
}

std::string hbm_json(const DeviceTier* device) {
  static const Budget kNone(0);
  const Budget& budget = device == nullptr ? kNone : device->budget();
  return Object()
      .number("limit", budget.limit())
      .number("used", budget.used())
      .number("peak", budget.peak())
      .number("window", budget.used(Use::kWindow))
      .number("cache", budget.used(Use::kCache))
      .number("window_entries", device == nullptr ? 0 : device->window_entries())
      .number("cached_entries", device == nullptr ? 0 : device->cache().size())
      .number("hits", device == nullptr ? 0 : device->hits())
      .done();
}

Object count_object(const Traffic::Count& count) {
  Object object;
  object.number("fetches", count.fetches)
      .number("wanted", count.wanted)
      .number("hits", count.hits)
      .number("read", count.read)
      .number("requests", count.requests)
      .number("bytes", count.bytes)
      .number("repaired", count.repaired)
      .seconds("wait_seconds", count.wait_seconds);
  return object;
}

std::string traffic_json(const Traffic& traffic, Purpose purpose) {
  Object object = count_object(traffic.by_purpose[static_cast<int>(purpose)]);
  if (purpose == Purpose::kPrefetch) {
    object.number("used", traffic.ahead.used)
        .number("wasted", traffic.ahead.wasted)
        .number("late", traffic.ahead.late)
        .number("late_requests", traffic.ahead.late_requests)
        .number("late_bytes", traffic.ahead.late_bytes);
  }
  return object.done();
}

std::string reuse_json(const ReuseDistances& reuse) {
  std::string counts(1, '[');
  for (const uint64_t count : reuse.count) {
    counts += (counts.size() > 1 ? ", " : "") + std::to_string(count);
  }
  return Object()
      .number("first", reuse.first)
      .number("expected", reuse.expected)
      .raw("distances", counts + "]")
      .done();
}

}  // namespace

std::string stats_json(const Traffic& traffic, const Budget& budget, const EntryPool& pool,
                       const ClusterCache& cache, const Holdings& holdings,
                       const DeviceTier* device,
                       const std::vector<std::shared_ptr<io::BlockDevice>>& drives,
                       const std::vector<DriveShape>& shapes, const DriveLoad& load) {
  std::string per_drive(1, '[');
  for (size_t i = 0; i < drives.size(); ++i) {
    const io::Counters counters = drives[i]->counters();
    const auto& decode = traffic.by_purpose[static_cast<int>(Purpose::kDecode)];
    const auto& early = traffic.by_purpose[static_cast<int>(Purpose::kPrefetch)];
    if (i > 0) per_drive += ", ";
    per_drive += Object()
                     .text("name", drives[i]->name())
                     .text("engine", drives[i]->engine())
                     .raw("direct", drives[i]->geometry().direct ? "true" : "false")
                     .number("block", drives[i]->geometry().block)
                     .seconds("t_base", shapes[i].model.t_base)
                     .seconds("t_transfer", shapes[i].model.t_transfer)
                     .seconds("slowness", load.slowness(i))
                     .number("decode_requests", decode.drive_requests[i] + early.drive_requests[i])
                     .number("decode_bytes", decode.drive_bytes[i] + early.drive_bytes[i])
                     .number("reads", counters.reads)
                     .number("writes", counters.writes)
                     .number("read_bytes", counters.read_bytes)
                     .number("write_bytes", counters.write_bytes)
                     .number("short_transfers", counters.short_transfers)
                     .number("errors", counters.errors)
                     .seconds("read_p50_us", counters.read_p50_us)
                     .seconds("read_p99_us", counters.read_p99_us)
                     .seconds("busy_seconds", counters.busy_seconds)
                     .done();
  }
  per_drive += ']';
  return Object()
      .number("entry_bytes", pool.entry_bytes())
      .number("segments_written", traffic.segments_written)
      .number("written_bytes", traffic.written_bytes)
      .number("stored_bytes", traffic.stored_bytes)
      .number("stored_entries", traffic.stored_entries)
      .number("stored_copies", traffic.stored_copies)
      .number("padding_bytes", holdings.allocated_bytes - traffic.stored_bytes)
      .number("cached_entry_bytes", ClusterCache::slot_bytes(pool.entry_bytes()))
      .number("tickets", holdings.tickets)
      .raw("dram", dram_json(budget, pool, cache.size(), holdings))
      .raw("hbm", hbm_json(device))
      .raw("decode", traffic_json(traffic, Purpose::kDecode))
      .raw("stream", traffic_json(traffic, Purpose::kStream))
      .raw("prefetch", traffic_json(traffic, Purpose::kPrefetch))
      .raw("reuse", reuse_json(cache.reuse()))
      .raw("drives", per_drive)
      .done();
}

}  // namespace swarm_kv
