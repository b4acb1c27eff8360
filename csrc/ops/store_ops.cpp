#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ops/gather_checks.h"
#include "ops/stores.h"

// The operators that reach the drives. A store crosses the operator boundary as a handle; what it
// does there (write, read, cache) is not visible in tensors, so none of these mutates an argument.
namespace swarm_kv::ops {
namespace {

constexpr double kLongestTimeout = 1e6;  // seconds

std::span<const int64_t> as_span(const Tensor& tensor) {
  return {data<int64_t>(tensor), static_cast<size_t>(tensor.numel())};
}

// Keys and values [heads, n, dim] whose rows are contiguous, kept alive while they are read.
struct KeysValues {
  Tensor keys;
  Tensor values;

  KeysValues(const char* op, const Tensor& k, const Tensor& v) : keys(rows(k)), values(rows(v)) {
    Argument{op, "k", k}.on_cpu().dim(3).floating();
    Argument{op, "v", v}.on_cpu().dim(3).dtype(k.scalar_type());
    for (int axis = 0; axis < 3; ++axis) {
      check(k.size(axis) == v.size(axis), op, ": `k` is ", describe(k), " but `v` is ", describe(v),
            "; both hold [kv_heads, entries, head_dim]");
    }
    check(k.size(0) > 0 && k.size(2) > 0, op, ": `k` is ", describe(k),
          "; an entry needs at least one head and one feature");
  }

  static Tensor rows(const Tensor& tensor) {
    return tensor.dim() == 3 && tensor.stride(2) != 1 ? as_contiguous(tensor) : tensor;
  }

  EntrySource source() const {
    const int64_t item = static_cast<int64_t>(keys.element_size());
    const auto half = [item](const Tensor& tensor) {
      return EntrySource::Half{static_cast<const std::byte*>(tensor.const_data_ptr()),
                               tensor.stride(0) * item, tensor.stride(1) * item};
    };
    return {half(keys), half(values), keys.size(0), keys.size(2) * item,
            element_of(keys.scalar_type())};
  }
};

int64_t store_open(std::vector<std::string> paths, std::string engine, bool direct,
                   bool shared_ring, double timeout, int64_t dram_bytes, int64_t staging_bytes,
                   int64_t disk_bytes, std::string placement, std::string router,
                   std::string cache_policy, bool verify, double t_base, double t_transfer) {
  check(dram_bytes > 0, "`dram_bytes` must be positive, got ", dram_bytes);
  check(staging_bytes > 0 && disk_bytes >= 0,
        "`staging_bytes` must be positive and `disk_bytes` at least 0, got ", staging_bytes,
        " and ", disk_bytes);
  check(timeout > 0 && timeout <= kLongestTimeout, "`timeout` must be in (0, ", kLongestTimeout,
        "] seconds, got ", timeout);
  StoreOptions options;
  for (const std::string& path : paths) {
    io::DeviceOptions drive;
    drive.path = path;
    drive.engine = engine;
    drive.direct = direct;
    drive.timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout * 1e3));
    if (t_base > 0 && t_transfer > 0) drive.model = {t_base, t_transfer};
    options.drives.push_back(drive);
  }
  options.shared_ring = shared_ring;
  options.dram_bytes = dram_bytes;
  options.staging_bytes = staging_bytes;
  options.disk_bytes = disk_bytes;
  options.placement = placement;
  options.router = router;
  options.cache_policy = cache_policy;
  options.verify = verify;
  options.model = {t_base, t_transfer};
  return add_store(std::make_shared<Store>(options));
}

void store_close(int64_t handle) {
  store_of(handle)->close();
  remove_store(handle);
}

void store_set_entry_bytes(int64_t handle, int64_t entry_bytes) {
  store_of(handle)->set_entry_bytes(entry_bytes);
}

Tensor store_pool(int64_t handle) {
  const std::shared_ptr<Region> region = store_of(handle)->region();
  return torch::stable::from_blob(region->data(), {static_cast<int64_t>(region->size())}, {1},
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                  ScalarType::Byte, [region](void*) {});
}

void store_charge(int64_t handle, int64_t bytes) { store_of(handle)->charge_index(bytes); }

std::string store_stats(int64_t handle) { return store_of(handle)->stats(); }

std::string store_notes(int64_t handle) {
  std::string lines;
  for (const std::string& note : store_of(handle)->notes()) lines += note + "\n";
  return lines;
}

Tensor window_append(int64_t handle, Tensor k, Tensor v) {
  const KeysValues entries("window_append", k, v);
  return int64_tensor(store_of(handle)->append(entries.source(), entries.keys.size(1)));
}

void window_retain(int64_t handle, Tensor slots) {
  store_of(handle)->retain(as_span(list_of("window_retain", "slots", slots, ScalarType::Long)));
}

void window_release(int64_t handle, Tensor slots) {
  store_of(handle)->release(as_span(list_of("window_release", "slots", slots, ScalarType::Long)));
}

int64_t segment_write(int64_t handle, Tensor k, Tensor v, Tensor offsets, Tensor members,
                      std::string label, std::optional<Tensor> activations,
                      std::string initial_fill, int64_t profile_queries, std::string codec,
                      std::optional<Tensor> starts) {
  const KeysValues entries("segment_write", k, v);
  Clusters clusters;
  clusters.offsets = int32_list("segment_write", "offsets", offsets);
  clusters.members = int32_list("segment_write", "members", members);
  check(!clusters.offsets.empty(), "segment_write: `offsets` needs at least one element");
  make_tier_score(initial_fill);  // an unknown name is an error without a profile too
  InitialFill fill;
  Tensor counts;
  if (activations) {
    counts = list_of("segment_write", "activations", *activations, ScalarType::Int);
    fill = {initial_fill,
            {data<int32_t>(counts), static_cast<size_t>(counts.numel())},
            profile_queries};
  }
  std::vector<int32_t> first_drives;
  if (starts) first_drives = int32_list("segment_write", "starts", *starts);
  return store_of(handle)->write(entries.source(), entries.keys.size(1), std::move(clusters), label,
                                 fill, codec, first_drives);
}

// What the store holds anyway, not a copy.
std::tuple<Tensor, Tensor> segment_clusters(int64_t handle, int64_t segment) {
  const std::shared_ptr<const Segment> held = store_of(handle)->segment(segment);
  const auto view = [&held](const std::vector<int32_t>& list) {
    return torch::stable::from_blob(const_cast<int32_t*>(list.data()),
                                    {static_cast<int64_t>(list.size())}, {1},
                                    torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                    ScalarType::Int, [held](void*) {});
  };
  return {view(held->clusters.offsets), view(held->clusters.members)};
}

// Of the store's own too.
Tensor segment_drives(int64_t handle, int64_t segment) {
  const std::shared_ptr<const Segment> held = store_of(handle)->segment(segment);
  const std::vector<uint8_t>& drives = held->placement.drive;
  return torch::stable::from_blob(const_cast<uint8_t*>(drives.data()),
                                  {static_cast<int64_t>(drives.size())}, {1},
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                  ScalarType::Byte, [held](void*) {});
}

int64_t stored_entry_bytes(Tensor k, std::string codec_name) {
  const KeysValues entries("stored_entry_bytes", k, k);
  const auto codec = make_codec(codec_name, entries.source(), 0);
  return codec ? codec->stored_bytes() : entries.source().entry_bytes();
}

// What segment_write writes of each entry, and what decode_entries needs beside it.
std::tuple<Tensor, Tensor> encode_entries(Tensor k, Tensor v, std::string codec_name) {
  const KeysValues entries("encode_entries", k, v);
  check_codec("encode_entries", codec_name);
  const EntrySource source = entries.source();
  const int64_t count = entries.keys.size(1);
  const std::unique_ptr<Codec> codec = make_codec(codec_name, source, count);
  const Tensor codes = empty_cpu({count, codec->stored_bytes()}, ScalarType::Byte);
  std::vector<std::byte> entry(source.entry_bytes());
  for (int64_t n = 0; n < count; ++n) {
    source.assemble(n, entry.data());
    codec->encode(entry.data(), mutable_data<std::byte>(codes) + n * codec->stored_bytes());
  }
  const std::span<const float> learned = codec->channels();
  const Tensor channels =
      empty_cpu({learned.empty() ? 0 : 2, source.heads, source.head_dim()}, ScalarType::Float);
  std::ranges::copy(learned, mutable_data<float>(channels));
  return {codes, channels};
}

void segment_free(int64_t handle, int64_t segment) { store_of(handle)->free_segment(segment); }

std::tuple<int64_t, Tensor, Tensor, Tensor> fetch_submit(
    int64_t handle, std::vector<int64_t> segments, std::vector<int64_t> segment_rows,
    Tensor clusters, Tensor cluster_rows, Tensor entries, Tensor entry_rows,
    std::vector<int64_t> limits, std::string purpose, int64_t ahead) {
  const WantedRows wanted("fetch_submit", std::move(segments), segment_rows, clusters, cluster_rows,
                          entries, entry_rows, limits);
  Delivery resident;
  const int64_t ticket =
      store_of(handle)->submit(wanted.rows(), purpose_of(purpose), ahead, resident);
  return {ticket, int64_tensor(resident.ids), int64_tensor(resident.slots),
          int64_tensor(resident.rows)};
}

std::tuple<Tensor, Tensor, Tensor, bool> fetch_wait(int64_t handle, int64_t ticket) {
  Delivery arrived;
  const bool more = store_of(handle)->wait(ticket, arrived);
  return {int64_tensor(arrived.ids), int64_tensor(arrived.slots), int64_tensor(arrived.rows), more};
}

void fetch_release(int64_t handle, int64_t ticket) { store_of(handle)->release_ticket(ticket); }

}  // namespace
}  // namespace swarm_kv::ops

STABLE_TORCH_LIBRARY_FRAGMENT(swarm_kv, m) {
  m.def(
      "store_open(str[] paths, str engine, bool direct, bool shared_ring, float timeout, "
      "int dram_bytes, int staging_bytes, int disk_bytes, str placement, str router, "
      "str cache_policy, bool verify, float t_base, float t_transfer) -> int");
  m.def("store_close(int store) -> ()");
  m.def("store_set_entry_bytes(int store, int entry_bytes) -> ()");
  m.def("store_pool(int store) -> Tensor");
  m.def("store_charge(int store, int bytes) -> ()");
  m.def("store_stats(int store) -> str");
  m.def("store_notes(int store) -> str");
  m.def("window_append(int store, Tensor k, Tensor v) -> Tensor");
  m.def("window_retain(int store, Tensor slots) -> ()");
  m.def("window_release(int store, Tensor slots) -> ()");
  m.def(
      "segment_write(int store, Tensor k, Tensor v, Tensor offsets, Tensor members, str label, "
      "Tensor? activations=None, str initial_fill=\"none\", int profile_queries=0, "
      "str codec=\"none\", Tensor? starts=None) -> int");
  m.def("segment_clusters(int store, int segment) -> (Tensor offsets, Tensor members)");
  m.def("segment_drives(int store, int segment) -> Tensor");
  m.def("stored_entry_bytes(Tensor k, str codec) -> int");
  m.def("encode_entries(Tensor k, Tensor v, str codec) -> (Tensor codes, Tensor channels)");
  m.def("segment_free(int store, int segment) -> ()");
  m.def(
      "fetch_submit(int store, int[] segments, int[] segment_rows, Tensor clusters, "
      "Tensor cluster_rows, Tensor entries, Tensor entry_rows, int[] limits, str purpose, "
      "int ahead) -> (int ticket, Tensor ids, Tensor slots, Tensor rows)");
  m.def("fetch_wait(int store, int ticket) -> (Tensor ids, Tensor slots, Tensor rows, bool more)");
  m.def("fetch_release(int store, int ticket) -> ()");
}

// Most of these take no tensor, so no backend's key would be chosen for them.
STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CompositeExplicitAutograd, m) {
  using namespace swarm_kv::ops;
  m.impl("store_open", SWARM_KV_BOX(store_open));
  m.impl("store_close", SWARM_KV_BOX(store_close));
  m.impl("store_set_entry_bytes", SWARM_KV_BOX(store_set_entry_bytes));
  m.impl("store_pool", SWARM_KV_BOX(store_pool));
  m.impl("store_charge", SWARM_KV_BOX(store_charge));
  m.impl("store_stats", SWARM_KV_BOX(store_stats));
  m.impl("store_notes", SWARM_KV_BOX(store_notes));
  m.impl("window_append", SWARM_KV_BOX(window_append));
  m.impl("window_retain", SWARM_KV_BOX(window_retain));
  m.impl("window_release", SWARM_KV_BOX(window_release));
  m.impl("segment_write", SWARM_KV_BOX(segment_write));
  m.impl("segment_clusters", SWARM_KV_BOX(segment_clusters));
  m.impl("segment_drives", SWARM_KV_BOX(segment_drives));
  m.impl("stored_entry_bytes", SWARM_KV_BOX(stored_entry_bytes));
  m.impl("encode_entries", SWARM_KV_BOX(encode_entries));
  m.impl("segment_free", SWARM_KV_BOX(segment_free));
  m.impl("fetch_submit", SWARM_KV_BOX(fetch_submit));
  m.impl("fetch_wait", SWARM_KV_BOX(fetch_wait));
  m.impl("fetch_release", SWARM_KV_BOX(fetch_release));
}
