#pragma once

#include <cstdint>
#include <variant>

#include "core/numeric.h"

namespace swarm_kv {

// A view of [heads, rows, dim] values of any floating type. The features of a row are contiguous;
// strides count values.
struct HeadRows {
  std::variant<const float*, const double*, const fp16*, const bf16*> data;
  int64_t heads = 0;
  int64_t rows = 0;
  int64_t dim = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
};

// Converts rows [first, first + count) of one head to out [count][dim].
void copy_rows(const HeadRows& view, int64_t head, int64_t first, int64_t count, float* out);

// The same rows as copy_rows gives, from where they are if that is how they are, else in `scratch`.
const float* rows_as_float(const HeadRows& view, int64_t head, int64_t first, int64_t count,
                           float* scratch);

// The largest |value| as float; NaN or infinity when there is one.
float largest_magnitude(const HeadRows& view);

}  // namespace swarm_kv
