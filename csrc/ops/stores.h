#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/store.h"
#include "ops/ragged.h"

namespace swarm_kv::ops {

// Stores cross the operator boundary as handles.
int64_t add_store(std::shared_ptr<Store> store);
// Throws Error(kState) for a handle that no open store has.
std::shared_ptr<Store> store_of(int64_t handle);
void remove_store(int64_t handle);

// What the sequences of a batch want of one layer, as operators take it: row r has
// segments[segment_rows[r] .. segment_rows[r + 1]), and so on. Checked; holds what its rows refer
// to.
class WantedRows {
 public:
  WantedRows(const char* op, std::vector<int64_t> segments,
             const std::vector<int64_t>& segment_rows, const Tensor& clusters,
             const Tensor& cluster_rows, const Tensor& entries, const Tensor& entry_rows,
             const std::vector<int64_t>& limits);
  WantedRows(const WantedRows&) = delete;
  WantedRows& operator=(const WantedRows&) = delete;

  std::span<const Row> rows() const { return rows_; }

 private:
  std::vector<int64_t> segments_;
  Ragged clusters_;
  Ragged entries_;
  std::vector<Row> rows_;
};

}  // namespace swarm_kv::ops
