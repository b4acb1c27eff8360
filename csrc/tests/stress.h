// Decoding steps at random over drives that fail at random. Every entry carries a pattern that no
// other has, and everything that a store holds is counted before and after.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/store.h"
#include "io/error.h"
#include "io/faulty_device.h"

namespace swarm_kv {

struct StressOptions {
  int64_t steps = 10000;  // of all threads together
  int threads = 4;
  std::string engine = "memory";
  std::vector<std::string> paths{};  // four directories, unless the engine is "memory"
  std::string router = "swarm";
  bool faults = true;
  bool verify = true;
  bool leak_a_ticket = false;
};

// Shares of a drive in what steps read from all drives.
struct DriveShare {
  double before = 0;
  double during = 0;
  double after = 0;
};

struct StressResult {
  std::atomic<uint64_t> steps{0}, joins{0}, leaves{0};
  std::atomic<uint64_t> cancelled{0};  // fetches released before everything had arrived
  std::atomic<uint64_t> entries{0};    // that arrived and were compared
  std::atomic<uint64_t> wrong{0};      // of these, those with a byte of something else
  std::atomic<uint64_t> missing{0};    // wanted and not delivered, or delivered and not wanted
  std::atomic<uint64_t> failures{0};   // fetches that ended with Error(kStorage)
  std::atomic<uint64_t> avoidable{0};  // of these, for an entry with a copy on a whole drive
  std::atomic<uint64_t> unnamed{0};    // of these, without drive, segment and entry in the message
  std::atomic<uint64_t> refused{0};    // calls that memory had no room for at first
  uint64_t faults = 0;
  uint64_t short_reads = 0;
  uint64_t repaired = 0;
  DriveShare slow_share;            // of the drive that is 50 times slower for a while
  std::vector<std::string> leaks;   // what is held at the end and was not at the start
  std::vector<std::string> errors;  // what should not have been thrown
};

// Four drives. The second has reads that fail or bring other bytes, now and then and for a while
// always; the third turns 50 times slower for a while; all have short reads. A thread has up to
// three fetches outstanding. All threads read one long segment, next to sequences of their own.
class Stress {
 public:
  static constexpr int kDrives = 4;
  static constexpr int kFailing = 1;
  static constexpr int kSlow = 2;

  Stress(const StressOptions& options, StressResult& result) : options_(options), result_(result) {}

  void run() {
    const size_t descriptors = open_descriptors();
    open();
    const Held start = held();
    shared_ = write(600);
    std::vector<std::thread> threads;
    for (int t = 0; t < options_.threads; ++t) {
      threads.emplace_back([this, t] { work(t); });
    }
    for (std::thread& thread : threads) thread.join();
    shared_.reset();
    if (options_.leak_a_ticket) leak();
    const std::string stats = store_->stats();
    result_.repaired = number(stats, "repaired", "decode") + number(stats, "repaired", "stream") +
                       number(stats, "repaired", "prefetch");
    for (const auto& drive : drives_) {
      result_.faults += drive->faults();
      result_.short_reads += drive->counters().short_transfers;
    }
    compare(start, held());
    store_.reset();
    drives_.clear();
    if (const size_t left = open_descriptors(); left != descriptors) {
      result_.leaks.push_back("file descriptors: " + std::to_string(descriptors) + " before, " +
                              std::to_string(left) + " after");
    }
  }

 private:
  static constexpr int64_t kHeadBytes = 384;
  static constexpr int64_t kEntryBytes = 2 * kHeadBytes;
  static constexpr size_t kWords = kEntryBytes / 8;
  using Entry = std::array<uint64_t, kWords>;
  using Held = std::map<std::string, uint64_t>;

  static Entry pattern(uint64_t owner, uint64_t number) {
    Entry entry;
    for (size_t i = 0; i < kWords; ++i) entry[i] = owner << 40 ^ number << 16 ^ i;
    return entry;
  }

  // `count` patterns in the form that the store takes.
  struct Source {
    std::vector<Entry> entries;

    Source(uint64_t owner, int64_t count) {
      for (int64_t n = 0; n < count; ++n) entries.push_back(pattern(owner, n));
    }
    EntrySource get() const {
      const auto* base = reinterpret_cast<const std::byte*>(entries.data());
      return {{base, 0, kEntryBytes}, {base + kHeadBytes, 0, kEntryBytes}, 1, kHeadBytes};
    }
  };

  // A segment that is freed with its last user, whatever still reads from it then.
  struct Written {
    Store* store;
    uint64_t owner;
    std::shared_ptr<const Segment> segment;
    ~Written() { store->free_segment(segment->id); }
  };

  struct Sequence {
    std::vector<std::shared_ptr<Written>> segments;
    uint64_t owner = 0;
    std::vector<int64_t> window;
    int64_t charged = 0;
  };

  // What a sequence wants of a fetch, and has not got yet.
  struct Asked {
    std::vector<std::shared_ptr<const Segment>> segments;
    std::vector<uint64_t> owners;
    std::vector<int64_t> handles, clusters, entries;
    int64_t limit = 0;
    std::set<int64_t> wanted;

    Row row() const { return {handles, clusters, entries, limit}; }
  };

  struct Outstanding {
    int64_t ticket = 0;
    std::vector<Asked> rows;
    bool exposed = false;  // another thread may release it
  };

  // ---- what is held

  static size_t open_descriptors() {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
  }

  static uint64_t number(const std::string& stats, const std::string& key,
                         const std::string& object = "") {
    const size_t from = object.empty() ? 0 : stats.find("\"" + object + "\": {");
    const std::string name = "\"" + key + "\": ";
    return std::stoull(stats.substr(stats.find(name, from) + name.size()));
  }

  Held held() const {
    const std::string stats = store_->stats();
    Held found;
    for (const char* key :
         {"tickets", "staged_bytes", "staging", "window", "window_entries", "index",
          "cached_entries", "stored_bytes", "stored_entries", "stored_copies", "padding_bytes"}) {
      found[key] = number(stats, key);
    }
    // The cache keeps what memory nobody else needs.
    found["used"] = number(stats, "used") - number(stats, "cache");
    return found;
  }

  void compare(const Held& before, const Held& after) {
    for (const auto& [key, value] : before) {
      if (after.at(key) == value) continue;
      result_.leaks.push_back(key + ": " + std::to_string(value) + " before, " +
                              std::to_string(after.at(key)) + " after");
    }
  }

  void leak() {
    const auto forgotten = write(8);
    const std::vector<int64_t> entries{0, 1};
    const std::vector<int64_t> handles{forgotten->segment->id};
    const Row row{handles, {}, entries, 8};
    Delivery resident;
    store_->submit({&row, 1}, Purpose::kStream, 0, resident);
  }

  // ---- drives and faults

  void open() {
    std::vector<io::DeviceOptions> devices(kDrives);
    for (int i = 0; i < kDrives; ++i) {
      devices[i].engine = options_.engine;
      devices[i].label = "drive" + std::to_string(i);
      if (!options_.paths.empty()) devices[i].path = options_.paths[i];
    }
    std::vector<std::shared_ptr<io::BlockDevice>> wrapped;
    for (const auto& device : io::open_devices(devices)) {
      drives_.push_back(std::make_shared<io::FaultyDevice>(device));
      wrapped.push_back(drives_.back());
    }
    StoreOptions options;
    options.dram_bytes = 2 << 20;
    options.staging_bytes = 768 << 10;
    options.verify = options_.verify;
    options.router = options_.router;
    options.model = {1e-5, 1e-9};
    store_ = std::make_unique<Store>(options, wrapped);
    store_->set_entry_bytes(kEntryBytes);
  }

  void fault(int drive, io::FaultKind kind, uint32_t count) {
    drives_[drive]->add_rule({.fault = kind, .count = count, .keep = 512});
  }

  std::vector<uint64_t> read_bytes() const {
    const std::string stats = store_->stats();
    std::vector<uint64_t> bytes;
    for (size_t at = 0; (at = stats.find("\"decode_bytes\": ", at)) != std::string::npos; ++at) {
      bytes.push_back(std::stoull(stats.substr(at + 16)));
    }
    return bytes;
  }

  // The share of the slow drive in what was read since the last call.
  double slow_share() {
    const std::vector<uint64_t> now = read_bytes();
    uint64_t all = 0;
    for (int i = 0; i < kDrives; ++i) all += now[i] - last_read_[i];
    const auto own = static_cast<double>(now[kSlow] - last_read_[kSlow]);
    last_read_ = now;
    return all == 0 ? 0 : own / static_cast<double>(all);
  }

  // Called by every thread before each of its steps; one at a time does what is due.
  void schedule(std::mt19937& random) {
    const std::unique_lock turn(schedule_mutex_, std::try_to_lock);
    if (!turn.owns_lock()) return;
    const double done = static_cast<double>(result_.steps) / static_cast<double>(options_.steps);
    const auto reach = [&](double part) { return phase_ < part && done >= part; };
    if (reach(0.001)) slow_share();
    if (reach(0.15)) result_.slow_share.before = slow_share();
    if (!options_.faults) {
      phase_ = done;
      return;
    }
    if (done > 0.15 && done < 0.30 && random() % 32 == 0) {
      fault(random() % kDrives, io::FaultKind::kShort, 3);
      fault(kFailing, random() % 2 ? io::FaultKind::kError : io::FaultKind::kCorrupt, 3);
    }
    if (reach(0.30)) fault(kFailing, io::FaultKind::kError, UINT32_MAX);
    if (reach(0.40)) drives_[kFailing]->clear_rules();
    if (reach(0.40)) fault(kFailing, io::FaultKind::kCorrupt, UINT32_MAX);
    if (reach(0.45)) drives_[kFailing]->clear_rules();
    if (reach(0.50)) {
      slow_share();
      const double usual = std::max(10.0, drives_[kSlow]->counters().read_p50_us);
      drives_[kSlow]->clear_rules();
      drives_[kSlow]->add_rule(
          {.fault = io::FaultKind::kDelay,
           .count = UINT32_MAX,
           .delay = std::chrono::microseconds(static_cast<int64_t>(50 * usual))});
    }
    if (reach(0.56)) {
      result_.slow_share.during = slow_share();
      drives_[kSlow]->clear_rules();
    }
    if (reach(0.60)) slow_share();
    if (reach(0.75)) result_.slow_share.after = slow_share();
    if (done > 0.75 && random() % 32 == 0) {
      fault(random() % kDrives, io::FaultKind::kShort, 2);
      fault(kFailing, random() % 2 ? io::FaultKind::kError : io::FaultKind::kCorrupt, 2);
    }
    phase_ = done;
  }

  // ---- sequences

  // Blocks of 8 neighbours, and all but every seventh entry once more in clusters of far ones.
  static Clusters clusters_of(int64_t entries) {
    Clusters clusters;
    const auto close = [&] { clusters.offsets.push_back(clusters.members.size()); };
    for (int64_t n = 0; n < entries; ++n) {
      clusters.members.push_back(n);
      if (n % 8 == 7 || n == entries - 1) close();
    }
    for (int64_t first = 1; first < 7; ++first) {
      for (int64_t n = first; n < entries; n += 7) {
        clusters.members.push_back(n);
        if (clusters.members.size() - clusters.offsets.back() == 10) close();
      }
    }
    if (clusters.offsets.back() != static_cast<int64_t>(clusters.members.size())) close();
    return clusters;
  }

  std::shared_ptr<Written> write(int64_t entries) {
    const uint64_t owner = next_owner_++;
    const Source source(owner, entries);
    const std::string label = "segment " + std::to_string(owner);
    const int64_t id = store_->write(source.get(), entries, clusters_of(entries), label);
    return std::make_shared<Written>(store_.get(), owner, store_->segment(id));
  }

  void join(std::deque<Sequence>& sequences, std::mt19937& random) {
    Sequence sequence;
    sequence.owner = next_owner_++;
    sequence.segments = {shared_, write(50 + random() % 200)};
    sequences.push_back(std::move(sequence));
    ++result_.joins;
    Sequence& joined = sequences.back();
    joined.window = store_->append(Source(joined.owner, 4).get(), 4);
    store_->charge_index(1000);
    joined.charged = 1000;
  }

  void fork(std::deque<Sequence>& sequences, std::mt19937& random) {
    Sequence other = sequences[random() % sequences.size()];
    other.charged = 0;
    store_->retain(other.window);
    sequences.push_back(std::move(other));
    ++result_.joins;
  }

  void leave(std::deque<Sequence>& sequences, size_t which) {
    Sequence& sequence = sequences[which];
    for (size_t n = 0; n < sequence.window.size(); ++n) {
      result_.wrong += !matches(sequence.owner, n, sequence.window[n]);
      ++result_.entries;
    }
    store_->release(sequence.window);
    store_->charge_index(-sequence.charged);
    sequences.erase(sequences.begin() + static_cast<int64_t>(which));
    ++result_.leaves;
  }

  bool matches(uint64_t owner, int64_t number, int64_t slot) const {
    const Entry expected = pattern(owner, number);
    return std::memcmp(expected.data(), store_->region()->data() + slot, kEntryBytes) == 0;
  }

  // ---- fetches

  static Asked ask(const Sequence& sequence, std::mt19937& random) {
    Asked asked;
    int64_t total = 0;
    for (const auto& written : sequence.segments) {
      asked.segments.push_back(written->segment);
      asked.owners.push_back(written->owner);
      asked.handles.push_back(written->segment->id);
      total += written->segment->entries;
    }
    asked.limit = random() % 4 ? total : random() % (total + 1);
    const auto want = [&](int64_t entry) {
      if (entry < asked.limit) asked.wanted.insert(entry);
    };
    int64_t first = 0, first_cluster = 0;
    for (const auto& segment : asked.segments) {
      const Clusters& all = segment->clusters;
      if (random() % 2) {
        const int64_t c = random() % all.count();
        asked.clusters.push_back(first_cluster + c);
        for (int32_t p = all.offsets[c]; p < all.offsets[c + 1]; ++p) want(first + all.members[p]);
      }
      first += segment->entries;
      first_cluster += all.count();
    }
    for (int i = 20 + random() % 40; i > 0; --i) {
      asked.entries.push_back(random() % total);
      want(asked.entries.back());
    }
    return asked;
  }

  // A fetch for one to three sequences, which may ride on a prefetch of a part of it.
  Outstanding submit(const std::deque<Sequence>& sequences, std::mt19937& random) {
    Outstanding fetch;
    for (int i = 1 + random() % 3; i > 0; --i) {
      fetch.rows.push_back(ask(sequences[random() % sequences.size()], random));
    }
    std::vector<Row> rows;
    for (const Asked& asked : fetch.rows) rows.push_back(asked.row());
    int64_t ahead = 0;
    Delivery resident;
    if (random() % 3 == 0) {
      std::vector<Row> part = rows;
      for (Row& row : part) row.entries = row.entries.first(random() % row.entries.size());
      ahead = store_->submit(part, Purpose::kPrefetch, 0, resident);
      if (random() % 8 == 0) {
        store_->release_ticket(std::exchange(ahead, 0));
        ++result_.cancelled;
      }
    }
    const auto purpose = random() % 8 ? Purpose::kDecode : Purpose::kStream;
    fetch.ticket = store_->submit(rows, purpose, ahead, resident);
    take(fetch, resident);
    return fetch;
  }

  void take(Outstanding& fetch, const Delivery& arrived) {
    for (size_t r = 0; r < fetch.rows.size(); ++r) {
      Asked& row = fetch.rows[r];
      for (int64_t i = arrived.rows[r]; i < arrived.rows[r + 1]; ++i) {
        int64_t number = arrived.ids[i];
        result_.missing += row.wanted.erase(number) == 0;
        if (fetch.exposed) continue;  // the slots may be another fetch's by now
        size_t segment = 0;
        while (number >= row.segments[segment]->entries) {
          number -= row.segments[segment++]->entries;
        }
        result_.wrong += !matches(row.owners[segment], number, arrived.slots[i]);
        ++result_.entries;
      }
    }
  }

  // Waits for all rounds, or for one. Returns false when memory was short: the ticket is still
  // good.
  bool finish(Outstanding& fetch, bool whole) {
    try {
      Delivery arrived;
      for (bool more = true; more && whole;) {
        more = store_->wait(fetch.ticket, arrived);
        take(fetch, arrived);
      }
      if (whole) {
        for (const Asked& row : fetch.rows) result_.missing += row.wanted.size();
      } else {
        if (fetch.ticket % 2) {
          store_->wait(fetch.ticket, arrived);
          take(fetch, arrived);
        }
        ++result_.cancelled;
      }
      store_->release_ticket(fetch.ticket);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kCapacity) return false;
      if (error.kind() == ErrorKind::kState && fetch.exposed) return true;
      if (error.kind() != ErrorKind::kStorage) throw;
      judge(fetch, error.what());
    }
    return true;
  }

  // A fetch that failed must say why, and only for an entry whose copies are all on the failing
  // drive.
  void judge(const Outstanding& fetch, const std::string& message) {
    ++result_.failures;
    const auto behind = [&](const std::string& words) {
      const size_t at = message.find(words);
      return at == std::string::npos ? -1 : std::atoll(message.c_str() + at + words.size());
    };
    const int64_t drive = behind("drive drive"), entry = behind(": entry ");
    const int64_t owner = behind(" of segment ");
    for (const Asked& row : fetch.rows) {
      for (size_t s = 0; s < row.owners.size(); ++s) {
        if (drive != kFailing || entry < 0 || row.owners[s] != static_cast<uint64_t>(owner)) {
          continue;
        }
        bool spare = false;
        for (const int32_t copy : row.segments[s]->routing.copies_of(entry)) {
          spare = spare || row.segments[s]->placement.drive[copy] != kFailing;
        }
        result_.avoidable += spare;
        return;
      }
    }
    ++result_.unnamed;
    note(message);
  }

  void note(const std::string& error) {
    const std::lock_guard lock(mutex_);
    result_.errors.push_back(error);
  }

  // ---- a thread

  void work(int thread) {
    std::mt19937 random(thread + 1);
    std::deque<Sequence> sequences;
    std::deque<Outstanding> fetches;
    const int64_t steps = options_.steps / options_.threads;
    for (int64_t step = 0; step < steps; ++step) {
      schedule(random);
      try {
        this->step(sequences, fetches, random);
      } catch (const Error& error) {
        if (error.kind() == ErrorKind::kCapacity) {
          ++result_.refused;
          if (!sequences.empty()) leave(sequences, 0);
        } else {
          note(error.what());
        }
      }
      ++result_.steps;
    }
    while (!fetches.empty()) settle(fetches, true);
    while (!sequences.empty()) leave(sequences, 0);
  }

  void step(std::deque<Sequence>& sequences, std::deque<Outstanding>& fetches,
            std::mt19937& random) {
    const unsigned dice = random() % 100;
    if (sequences.empty() || (dice < 4 && sequences.size() < 5)) join(sequences, random);
    if (dice >= 4 && dice < 8) leave(sequences, random() % sequences.size());
    if (sequences.empty()) return;
    if (dice >= 8 && dice < 11 && sequences.size() < 5) fork(sequences, random);
    if (dice >= 11 && dice < 14) {
      Sequence& grown = sequences[random() % sequences.size()];
      if (grown.segments.size() < 4) grown.segments.push_back(write(40));
    }
    fetches.push_back(submit(sequences, random));
    if (dice >= 14 && dice < 20) cancel_from_outside(fetches.back());
    while (fetches.size() > 2 || (!fetches.empty() && random() % 4 == 0)) {
      settle(fetches, random() % 10 > 0);
    }
  }

  // Ends the oldest fetch. Where memory is short, the others are cancelled for it.
  void settle(std::deque<Outstanding>& fetches, bool whole) {
    Outstanding fetch = std::move(fetches.front());
    fetches.pop_front();
    while (!finish(fetch, whole)) {
      ++result_.refused;
      if (fetches.empty()) continue;
      release(fetches.back());
      fetches.pop_back();
    }
  }

  void release(const Outstanding& fetch) {
    try {
      store_->release_ticket(fetch.ticket);
      ++result_.cancelled;
    } catch (const Error& error) {
      if (!fetch.exposed || error.kind() != ErrorKind::kState) throw;
    }
  }

  // Puts a ticket where another thread finds it, and releases the one that it finds there, whatever
  // its owner does with it at that moment.
  void cancel_from_outside(Outstanding& fetch) {
    fetch.exposed = true;
    const int64_t found = exposed_.exchange(fetch.ticket);
    if (found == 0) return;
    try {
      store_->release_ticket(found);
      ++result_.cancelled;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kState) throw;
    }
  }

  const StressOptions options_;
  StressResult& result_;
  std::vector<std::shared_ptr<io::FaultyDevice>> drives_;
  std::unique_ptr<Store> store_;
  std::shared_ptr<Written> shared_;
  std::atomic<uint64_t> next_owner_{1};
  std::atomic<int64_t> exposed_{0};
  std::vector<uint64_t> last_read_ = std::vector<uint64_t>(kDrives);
  std::mutex schedule_mutex_;
  double phase_ = 0;  // share of the steps at which schedule() was last
  std::mutex mutex_;
};

}  // namespace swarm_kv
