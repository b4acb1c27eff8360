#include "core/signature_options.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/query_tile.h"
#include "io/error.h"

namespace swarm_kv {
namespace {

[[noreturn]] void fail(const std::string& message) {
  throw Error(ErrorKind::kArgument, "activation_signatures: " + message);
}

void check_finite(const char* name, float largest) {
  if (!std::isfinite(largest)) fail(std::string(name) + " holds NaN or infinity");
}

}  // namespace

HeadAggregation head_aggregation(const std::string& name) {
  if (name == "mean") return HeadAggregation::kMean;
  if (name == "max") return HeadAggregation::kMax;
  if (name == "union") return HeadAggregation::kUnion;
  throw Error(ErrorKind::kArgument,
              "unknown `heads` \"" + name + "\"; choose one of: mean, max, union");
}

int32_t activation_budget(const SignatureOptions& options, int64_t num_entries) {
  const int64_t context = options.context > 0 ? options.context : num_entries;
  const double rounded = std::round(options.sparsity * static_cast<double>(context));
  return static_cast<int32_t>(std::clamp(rounded, 1.0, static_cast<double>(num_entries)));
}

void check_signature_sizes(const SignatureSizes& sizes, const SignatureOptions& options) {
  if (sizes.heads_kv < 1 || sizes.heads_q < sizes.heads_kv || sizes.heads_q % sizes.heads_kv != 0) {
    fail("heads_q must be a positive multiple of heads_kv, got " + std::to_string(sizes.heads_q) +
         " and " + std::to_string(sizes.heads_kv));
  }
  if (sizes.dim_q < 1 || sizes.dim_q != sizes.dim_k) {
    fail("dim must be at least 1 and the same in q and k, got " + std::to_string(sizes.dim_q) +
         " and " + std::to_string(sizes.dim_k));
  }
  if (sizes.num_queries < 0) {
    fail("num_queries must be at least 0, got " + std::to_string(sizes.num_queries));
  }
  if (sizes.num_entries < 0 ||
      sizes.num_entries > std::numeric_limits<int32_t>::max() - kBlockKeys) {
    fail("num_entries must be in [0, 2^31 - 97], got " + std::to_string(sizes.num_entries));
  }
  if (!(options.sparsity > 0.0 && options.sparsity <= 1.0)) {
    fail("sparsity must be in (0, 1], got " + std::to_string(options.sparsity));
  }
  if (options.window < 0) fail("window must be at least 0, got " + std::to_string(options.window));
  if (options.sinks < 0) fail("sinks must be at least 0, got " + std::to_string(options.sinks));
  if (options.context < 0) {
    fail("context must be at least 0 (0: num_entries), got " + std::to_string(options.context));
  }
  if (!std::isfinite(options.scale)) {
    fail("scale must be finite, got " + std::to_string(options.scale));
  }
}

void check_signature_values(float largest_q, float largest_k, float largest_lse, int64_t dim,
                            double scale) {
  check_finite("q", largest_q);
  check_finite("k", largest_k);
  check_finite("lse", largest_lse);
  // Bounds every product and sum on the way to a score.
  const double largest_score =
      std::abs(scale) * largest_q * std::max(1.0, static_cast<double>(largest_k) * dim);
  if (!(largest_score <= std::numeric_limits<float>::max())) {
    fail("scores may overflow float32: q (up to " + std::to_string(largest_q) + "), k (up to " +
         std::to_string(largest_k) + ") or scale " + std::to_string(scale) + " is too large");
  }
}

}  // namespace swarm_kv
