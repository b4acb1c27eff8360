#include <torch/csrc/stable/library.h>

// The operators that compute. Shapes, units and errors stand in swarm_kv/ops.py. The store's
// operators are defined in store_ops.cpp.
STABLE_TORCH_LIBRARY(swarm_kv, m) {
  m.def(
      "activation_signatures(Tensor q, Tensor k, Tensor q_positions, float sparsity, int window, "
      "int sinks, float scale, Tensor? lse=None, str heads='mean') -> Tensor");
  m.def(
      "cluster(Tensor bits, str clusterer, str distance, float tau, int max_size, "
      "int max_replicas, int min_activation, str cold, int block, int max_index_bytes, int seed) "
      "-> (Tensor offsets, Tensor members)");
  m.def(
      "join_clusters(Tensor bits, Tensor medoid_bits, int steps, str distance, float tau, "
      "int max_replicas) -> (Tensor rows, Tensor homes)");
  m.def(
      "score_codes(Tensor q, Tensor codebooks, Tensor codes, float scale, Tensor? turn=None) "
      "-> Tensor");
  m.def(
      "score_packed_codes(Tensor q, Tensor codebooks, Tensor codes, float scale, Tensor? "
      "turn=None) "
      "-> Tensor");
  m.def("score_clusters(Tensor q, Tensor keys, float scale) -> Tensor");
  m.def("score_coded_clusters(Tensor q, Tensor keys, Tensor scales, float scale) -> Tensor");
  m.def("select_clusters(Tensor scores, Tensor offsets, Tensor members, int budget) -> Tensor");
  m.def("select_intervals(Tensor probs, Tensor members, int budget, float request_cost) -> Tensor");
  m.def(
      "select_two_level(Tensor probs, Tensor offsets, Tensor members, int budget, "
      "float request_cost, float single_share) -> (Tensor clusters, Tensor entries)");
  m.def(
      "sparse_attention(Tensor q, Tensor pool, Tensor slots, Tensor row_offsets, int kv_heads, "
      "float scale, Tensor? sinks=None, float? softcap=None) -> (Tensor out, Tensor lse)");
  m.def(
      "merge_attention(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) "
      "-> (Tensor out, Tensor lse)");
}
