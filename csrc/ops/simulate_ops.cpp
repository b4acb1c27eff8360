#include <cmath>
#include <tuple>

#include "core/simulate.h"
#include "core/simulate_cache.h"
#include "ops/ragged.h"

namespace swarm_kv::ops {
namespace {

std::vector<DriveShape> drives_of(const char* op, const Tensor& t_base, const Tensor& t_transfer,
                                  int64_t block) {
  const Tensor base = list_of(op, "t_base", t_base, ScalarType::Double);
  const Tensor transfer = list_of(op, "t_transfer", t_transfer, ScalarType::Double);
  check(base.numel() == transfer.numel(), op, ": `t_base` has ", base.numel(),
        " drives but `t_transfer` has ", transfer.numel());
  check(block >= 1 && block <= 1 << 30 && (block & (block - 1)) == 0, op,
        ": `block` must be a power of two of at most 2^30, got ", block);
  std::vector<DriveShape> drives;
  for (int64_t d = 0; d < base.numel(); ++d) {
    const io::DeviceModel model{data<double>(base)[d], data<double>(transfer)[d]};
    check(model.t_base > 0 && model.t_transfer > 0 && std::isfinite(model.t_base) &&
              std::isfinite(model.t_transfer),
          op, ": drive ", d, " needs positive, finite seconds per request and per byte, got ",
          model.t_base, " and ", model.t_transfer);
    drives.push_back({model, static_cast<uint32_t>(block)});
  }
  return drives;
}

Tensor matrix_of(const std::vector<int64_t>& values, int64_t rows, int64_t columns) {
  Tensor result = empty_cpu({rows, columns}, ScalarType::Long);
  std::copy(values.begin(), values.end(), mutable_data<int64_t>(result));
  return result;
}

std::tuple<Tensor, Tensor, Tensor> reads_of(Tensor offsets, Tensor members, int64_t entries,
                                            int64_t entry_bytes, Tensor t_base, Tensor t_transfer,
                                            int64_t block, std::string placement,
                                            std::string router, Tensor clusters,
                                            Tensor cluster_rows, Tensor wanted,
                                            Tensor wanted_rows) {
  constexpr const char* op = "simulate_reads";
  const Ragged whole(op, "clusters", clusters, "cluster_rows", cluster_rows);
  const Ragged single(op, "wanted", wanted, "wanted_rows", wanted_rows);
  check(whole.count() == single.count(), op, ": `cluster_rows` has ", whole.count(),
        " steps but `wanted_rows` has ", single.count());
  std::vector<SimulatedStep> steps;
  for (int64_t t = 0; t < whole.count(); ++t) steps.push_back({whole.row(t), single.row(t)});
  SimulatedLayout layout{
      .clusters = {int32_list(op, "offsets", offsets), int32_list(op, "members", members)},
      .entries = entries,
      .entry_bytes = entry_bytes,
      .drives = drives_of(op, t_base, t_transfer, block),
      .placement = std::move(placement),
      .router = std::move(router)};
  const SimulatedReads reads = simulate_reads(std::move(layout), steps);
  Tensor seconds = empty_cpu({whole.count()}, ScalarType::Double);
  std::copy(reads.seconds.begin(), reads.seconds.end(), mutable_data<double>(seconds));
  return {matrix_of(reads.requests, whole.count(), t_base.numel()),
          matrix_of(reads.bytes, whole.count(), t_base.numel()), seconds};
}

Tensor hits_of(Tensor offsets, Tensor members, int64_t entries, int64_t entry_bytes, Tensor t_base,
               Tensor t_transfer, std::string placement, std::string policy, int64_t capacity,
               std::string initial_fill, Tensor activations, int64_t profile_queries, Tensor wanted,
               Tensor wanted_rows) {
  constexpr const char* op = "simulate_cache";
  const Ragged single(op, "wanted", wanted, "wanted_rows", wanted_rows);
  const std::vector<int32_t> profile = int32_list(op, "activations", activations);
  std::vector<std::span<const int64_t>> steps;
  for (int64_t t = 0; t < single.count(); ++t) steps.push_back(single.row(t));
  const std::vector<uint8_t> served = simulate_cache(
      {.clusters = {int32_list(op, "offsets", offsets), int32_list(op, "members", members)},
       .entries = entries,
       .entry_bytes = entry_bytes,
       .drives = drives_of(op, t_base, t_transfer, 1),
       .placement = std::move(placement),
       .router = ""},
      policy, capacity, {initial_fill, profile, profile_queries}, steps);
  Tensor hits = empty_cpu({single.values.numel()}, ScalarType::Bool);
  std::copy(served.begin(), served.end(), mutable_data<bool>(hits));
  return hits;
}

}  // namespace
}  // namespace swarm_kv::ops

STABLE_TORCH_LIBRARY_FRAGMENT(swarm_kv, m) {
  m.def(
      "simulate_reads(Tensor offsets, Tensor members, int entries, int entry_bytes, Tensor t_base, "
      "Tensor t_transfer, int block, str placement, str router, Tensor clusters, "
      "Tensor cluster_rows, Tensor wanted, Tensor wanted_rows) "
      "-> (Tensor requests, Tensor bytes, Tensor seconds)");
  m.def(
      "simulate_cache(Tensor offsets, Tensor members, int entries, int entry_bytes, Tensor t_base, "
      "Tensor t_transfer, str placement, str policy, int capacity, str initial_fill, "
      "Tensor activations, int profile_queries, Tensor wanted, Tensor wanted_rows) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CPU, m) {
  m.impl("simulate_reads", SWARM_KV_BOX(swarm_kv::ops::reads_of));
  m.impl("simulate_cache", SWARM_KV_BOX(swarm_kv::ops::hits_of));
}
