#include <cmath>
#include <tuple>

#include "core/simulate.h"
#include "ops/tensors.h"

namespace swarm_kv::ops {
namespace {

constexpr const char* kOp = "simulate_reads";

Tensor list_of(const char* name, const Tensor& tensor, ScalarType dtype) {
  Argument{kOp, name, tensor}.on_cpu().dim(1).dtype(dtype);
  return as_contiguous(tensor);
}

std::vector<int32_t> int32_list(const char* name, const Tensor& tensor) {
  const Tensor list = list_of(name, tensor, ScalarType::Int);
  return {data<int32_t>(list), data<int32_t>(list) + list.numel()};
}

// Row t of a ragged list: values[rows[t] .. rows[t + 1]).
struct Ragged {
  Tensor values;
  Tensor rows;

  Ragged(const char* name, const Tensor& v, const char* rows_name, const Tensor& r)
      : values(list_of(name, v, ScalarType::Long)), rows(list_of(rows_name, r, ScalarType::Long)) {
    const int64_t* bounds = data<int64_t>(rows);
    check(rows.numel() > 0 && bounds[0] == 0 && bounds[count()] == values.numel(), kOp, ": `",
          rows_name, "` must run from 0 to the length of `", name, "`, ", values.numel());
    for (int64_t t = 0; t < count(); ++t) {
      check(bounds[t] <= bounds[t + 1], kOp, ": `", rows_name, "` must ascend, but ", bounds[t],
            " is followed by ", bounds[t + 1]);
    }
  }

  int64_t count() const { return rows.numel() - 1; }
  std::span<const int64_t> row(int64_t t) const {
    const int64_t* bounds = data<int64_t>(rows);
    return {data<int64_t>(values) + bounds[t], static_cast<size_t>(bounds[t + 1] - bounds[t])};
  }
};

std::vector<DriveShape> drives_of(const Tensor& t_base, const Tensor& t_transfer, int64_t block) {
  const Tensor base = list_of("t_base", t_base, ScalarType::Double);
  const Tensor transfer = list_of("t_transfer", t_transfer, ScalarType::Double);
  check(base.numel() == transfer.numel(), kOp, ": `t_base` has ", base.numel(),
        " drives but `t_transfer` has ", transfer.numel());
  check(block >= 1 && block <= 1 << 30 && (block & (block - 1)) == 0, kOp,
        ": `block` must be a power of two of at most 2^30, got ", block);
  std::vector<DriveShape> drives;
  for (int64_t d = 0; d < base.numel(); ++d) {
    const io::DeviceModel model{data<double>(base)[d], data<double>(transfer)[d]};
    check(model.t_base > 0 && model.t_transfer > 0 && std::isfinite(model.t_base) &&
              std::isfinite(model.t_transfer),
          kOp, ": drive ", d, " needs positive, finite seconds per request and per byte, got ",
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

std::tuple<Tensor, Tensor, Tensor> simulate(Tensor offsets, Tensor members, int64_t entries,
                                            int64_t entry_bytes, Tensor t_base, Tensor t_transfer,
                                            int64_t block, std::string placement,
                                            std::string router, Tensor clusters,
                                            Tensor cluster_rows, Tensor wanted,
                                            Tensor wanted_rows) {
  const Ragged whole("clusters", clusters, "cluster_rows", cluster_rows);
  const Ragged single("wanted", wanted, "wanted_rows", wanted_rows);
  check(whole.count() == single.count(), kOp, ": `cluster_rows` has ", whole.count(),
        " steps but `wanted_rows` has ", single.count());
  std::vector<SimulatedStep> steps;
  for (int64_t t = 0; t < whole.count(); ++t) steps.push_back({whole.row(t), single.row(t)});
  SimulatedLayout layout{
      .clusters = {int32_list("offsets", offsets), int32_list("members", members)},
      .entries = entries,
      .entry_bytes = entry_bytes,
      .drives = drives_of(t_base, t_transfer, block),
      .placement = std::move(placement),
      .router = std::move(router)};
  const SimulatedReads reads = simulate_reads(std::move(layout), steps);
  Tensor seconds = empty_cpu({whole.count()}, ScalarType::Double);
  std::copy(reads.seconds.begin(), reads.seconds.end(), mutable_data<double>(seconds));
  return {matrix_of(reads.requests, whole.count(), t_base.numel()),
          matrix_of(reads.bytes, whole.count(), t_base.numel()), seconds};
}

}  // namespace
}  // namespace swarm_kv::ops

STABLE_TORCH_LIBRARY_FRAGMENT(swarm_kv, m) {
  m.def(
      "simulate_reads(Tensor offsets, Tensor members, int entries, int entry_bytes, Tensor t_base, "
      "Tensor t_transfer, int block, str placement, str router, Tensor clusters, "
      "Tensor cluster_rows, Tensor wanted, Tensor wanted_rows) "
      "-> (Tensor requests, Tensor bytes, Tensor seconds)");
}

STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CPU, m) {
  m.impl("simulate_reads", SWARM_KV_BOX(swarm_kv::ops::simulate));
}
