#include "core/head_rows.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "core/parallel.h"

namespace swarm_kv {

void copy_rows(const HeadRows& view, int64_t head, int64_t first, int64_t count, float* out) {
  std::visit(
      [&](const auto* data) {
        const auto* row = data + head * view.head_stride + first * view.row_stride;
        if (view.row_stride == view.dim) return to_float(row, out, count * view.dim);
        for (int64_t r = 0; r < count; ++r) {
          to_float(row + r * view.row_stride, out + r * view.dim, view.dim);
        }
      },
      view.data);
}

const float* rows_as_float(const HeadRows& view, int64_t head, int64_t first, int64_t count,
                           float* scratch) {
  const auto* data = std::get_if<const float*>(&view.data);
  if (data != nullptr && view.row_stride == view.dim) {
    return *data + head * view.head_stride + first * view.row_stride;
  }
  copy_rows(view, head, first, count, scratch);
  return scratch;
}

float largest_magnitude(const HeadRows& view) {
  constexpr int64_t kRows = 64;
  constexpr int64_t kMostParts = 128;  // per head
  const int64_t part_rows = std::max(kRows, (view.rows + kMostParts - 1) / kMostParts);
  const int64_t parts = (view.rows + part_rows - 1) / part_rows;
  std::vector<float> largest(view.heads * parts, 0.0f);
  parallel_for(0, view.heads * parts, 1, [&](int64_t part, int64_t) {
    const auto block = std::make_unique_for_overwrite<float[]>(kRows * view.dim);
    const int64_t begin = part % parts * part_rows;
    const int64_t end = std::min(begin + part_rows, view.rows);
    for (int64_t row = begin; row < end; row += kRows) {
      const int64_t count = std::min(kRows, end - row);
      const float* values = rows_as_float(view, part / parts, row, count, block.get());
      const float both[] = {largest[part], largest_magnitude(values, count * view.dim)};
      largest[part] = largest_magnitude(both, 2);
    }
  });
  return largest_magnitude(largest.data(), static_cast<int64_t>(largest.size()));
}

}  // namespace swarm_kv
