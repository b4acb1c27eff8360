#include "ops/cuda/gpu_call.h"
#include "ops/cuda/scoring.h"
#include "ops/selection_checks.h"

namespace swarm_kv::ops {
namespace {

// The queries of a score, turned where there is a `turn`; `turned` holds their numbers then.
ScoreQueries turned_queries(const GpuCall& call, const char* op, const Tensor& q,
                            const Tensor& q_contiguous, int64_t kv_heads,
                            const std::optional<Tensor>& turn, Tensor& turned) {
  ScoreQueries queries = grouped(op, q, q_contiguous, kv_heads);
  if (!turn) return queries;
  const Tensor turn_c = as_contiguous(as_device_floats(*turn));
  turned = call.empty({q.numel()}, ScalarType::Float);
  call.check(cuda::turn_queries(queries,
                                {turn_c.const_data_ptr(), element_of(turn_c.scalar_type())},
                                mutable_data<float>(turned), call.stream()));
  queries.data = data<float>(turned);
  return queries;
}

Tensor score_codes(const Tensor& q, const Tensor& codebooks, const Tensor& codes, double scale,
                   const std::optional<Tensor>& turn) {
  check_on_one_gpu(kScoreCodes, {{"q", q}, {"codebooks", codebooks}, {"codes", codes}});
  if (turn) check_on_one_gpu(kScoreCodes, {{"q", q}, {"turn", *turn}});
  check_score_codes(q, codebooks, codes, turn);
  const GpuCall call(kScoreCodes, q);
  const int64_t parts = codebooks.size(1), codewords = codebooks.size(2), items = codes.size(2);
  const Tensor q_c = as_contiguous(q, ScalarType::Float);
  Tensor turned;
  const ScoreQueries queries =
      turned_queries(call, kScoreCodes, q, q_c, codebooks.size(0), turn, turned);
  const Tensor codebooks_c = as_contiguous(codebooks), codes_c = as_contiguous(codes);
  const Tensor out = call.empty({items}, ScalarType::Float);
  if (items == 0) return out;
  // Codes of eight bits cannot be too large; only for others the host waits.
  if (codewords < 256) {
    call.refuse_capture();
    const Tensor greatest = call.empty({1}, ScalarType::Int);
    call.check(cuda::max_code(data<uint8_t>(codes_c), codes_c.numel(),
                              mutable_data<int32_t>(greatest), call.stream()));
    check_highest_code(call.read<int32_t>(greatest), codewords);
  }
  const Tensor scratch = call.bytes(cuda::score_codes_scratch(queries, parts, codewords, items));
  call.check(cuda::score_codes(queries, data<float>(codebooks_c), parts, codewords,
                               data<uint8_t>(codes_c), items, static_cast<float>(scale),
                               mutable_data<float>(out), scratch.mutable_data_ptr(),
                               call.stream()));
  return out;
}

Tensor score_packed_codes(const Tensor& q, const Tensor& codebooks, const Tensor& codes,
                          double scale, const std::optional<Tensor>& turn) {
  const char* op = kScorePackedCodes;
  check_on_one_gpu(op, {{"q", q}, {"codebooks", codebooks}, {"codes", codes}});
  if (turn) check_on_one_gpu(op, {{"q", q}, {"turn", *turn}});
  check_score_packed_codes(q, codebooks, codes, turn);
  const GpuCall call(op, q);
  const int64_t parts = codebooks.size(1), items = codes.size(2);
  const Tensor q_c = as_contiguous(q, ScalarType::Float);
  Tensor turned;
  const ScoreQueries queries = turned_queries(call, op, q, q_c, codebooks.size(0), turn, turned);
  const Tensor codebooks_c = as_contiguous(codebooks), codes_c = as_contiguous(codes);
  const Tensor out = call.empty({items}, ScalarType::Float);
  if (items == 0) return out;
  const Tensor scratch = call.bytes(cuda::score_packed_codes_scratch(queries, parts, items));
  call.check(cuda::score_packed_codes(queries, data<float>(codebooks_c), parts,
                                      data<uint8_t>(codes_c), items, static_cast<float>(scale),
                                      mutable_data<float>(out), scratch.mutable_data_ptr(),
                                      call.stream()));
  return out;
}

Tensor score_clusters(const Tensor& q, const Tensor& keys, double scale) {
  check_on_one_gpu(kScoreClusters, {{"q", q}, {"keys", keys}});
  check_score_clusters(q, keys);
  const GpuCall call(kScoreClusters, q);
  const int64_t items = keys.size(1);
  const Tensor q_c = as_contiguous(q, ScalarType::Float);
  const ScoreQueries queries = grouped(kScoreClusters, q, q_c, keys.size(0));
  const Tensor keys_c = as_contiguous(as_device_floats(keys));
  const Tensor out = call.empty({items}, ScalarType::Float);
  if (items == 0) return out;
  const Tensor scratch = call.bytes(cuda::score_keys_scratch(queries, items));
  call.check(cuda::score_keys(queries, {keys_c.const_data_ptr(), element_of(keys_c.scalar_type())},
                              items, static_cast<float>(scale), mutable_data<float>(out),
                              scratch.mutable_data_ptr(), call.stream()));
  return out;
}

Tensor score_coded_clusters(const Tensor& q, const Tensor& keys, const Tensor& scales,
                            double scale) {
  const char* op = kScoreCodedClusters;
  check_on_one_gpu(op, {{"q", q}, {"keys", keys}, {"scales", scales}});
  check_score_coded_clusters(q, keys, scales);
  const GpuCall call(op, q);
  const int64_t items = keys.size(1);
  const Tensor q_c = as_contiguous(q, ScalarType::Float);
  const ScoreQueries queries = grouped(op, q, q_c, keys.size(0));
  const Tensor keys_c = as_contiguous(keys), scales_c = as_contiguous(scales);
  const Tensor out = call.empty({items}, ScalarType::Float);
  if (items == 0) return out;
  const Tensor scratch = call.bytes(cuda::score_coded_keys_scratch(queries, items));
  call.check(cuda::score_coded_keys(queries, data<uint8_t>(keys_c), data<float>(scales_c), items,
                                    static_cast<float>(scale), mutable_data<float>(out),
                                    scratch.mutable_data_ptr(), call.stream()));
  return out;
}

}  // namespace
}  // namespace swarm_kv::ops

STABLE_TORCH_LIBRARY_IMPL(swarm_kv, CUDA, m) {
  m.impl("score_codes", SWARM_KV_BOX(swarm_kv::ops::score_codes));
  m.impl("score_packed_codes", SWARM_KV_BOX(swarm_kv::ops::score_packed_codes));
  m.impl("score_clusters", SWARM_KV_BOX(swarm_kv::ops::score_clusters));
  m.impl("score_coded_clusters", SWARM_KV_BOX(swarm_kv::ops::score_coded_clusters));
}
