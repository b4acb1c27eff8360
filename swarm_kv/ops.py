"""The operators `torch.ops.swarm_kv.*` that compute, with typed errors, and their fake kernels.

Every function here calls the operator of the same name, whose schema stands in
csrc/ops/library.cpp, and raises the classes of `swarm_kv.errors`; calling `torch.ops.swarm_kv`
directly gives RuntimeError with the class name as a prefix. Each has a reference implementation of
the same name in `swarm_kv.reference`.

Shapes: `Hq` query heads, `Hkv` KV heads (query head h uses KV head h // (Hq // Hkv)), `D` features
of a head, `N` entries of the context, `C` clusters. Floating arguments may be float16, bfloat16,
float32 or float64 and of any strides unless said otherwise. `sparse_attention` and
`merge_attention` have a backward; arguments of the others that require grad raise
NotImplementedError while grad mode is on (`swarm_kv.autograd`).

All but `cluster`, `join_clusters` and `select_intervals` also run on CUDA devices; all tensors of a
call are then on one device, and so are its results. `activation_signatures`, `select_clusters`,
`select_two_level`, and `score_codes` with fewer than 256 codewords look at values on the host: they
wait for the device, and refuse to be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import autograd  # noqa: F401  (loads the operators and registers their gradients)
from .dense import accumulation_dtype
from .errors import typed_errors

__all__ = [
    "activation_signatures",
    "cluster",
    "join_clusters",
    "merge_attention",
    "score_clusters",
    "score_coded_clusters",
    "score_codes",
    "score_packed_codes",
    "select_clusters",
    "select_intervals",
    "select_two_level",
    "sparse_attention",
]

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@typed_errors
def activation_signatures(
    q: Tensor,
    k: Tensor,
    q_positions: Tensor,
    sparsity: float = 0.10,
    window: int = 256,
    sinks: int = 0,
    scale: float = 1.0,
    lse: Tensor | None = None,
    heads: str = "mean",
) -> Tensor:
    """Profiles one layer: which entries does each query activate (arXiv 2603.17803, section 5.1).

    A query head's probability of entry j for query t is `exp(scale * q[h, t] . k[h, j] - lse[h,
    t])`, at most 1: the softmax over the keys `j <= q_positions[t]`. The query activates the
    `max(1, round(sparsity * N))` entries of highest positive probability, aggregated over heads,
    outside the first `sinks` tokens and its own last `window` ones (itself included), which are
    always in memory; equal ones go to the lower index. Computed in float32, block of keys by block,
    in memory of at most the result or 2 MiB (64 N bytes for Q < 512).

    Profiles of the same entries by different queries merge by `torch.cat(bits, dim=1)`.

    Args:
        q: [Hq, Q, D] floating, rotated as attention sees them.
        k: [Hkv, N, D] floating; copied only if its features are not contiguous.
        q_positions: [Q] int64, index of each query's own token in the numbering of keys, >= 0.
        sparsity: share of the N entries that one query activates, in (0, 1].
        window: tokens, >= 0.
        sinks: tokens, >= 0.
        scale: multiplies q . k.
        lse: [Hq, Q] floating, what attention already computed: the log-sum-exp of the scaled scores
            over all keys that the query sees, in k or not. None: computed from k, which takes about
            twice as long.
        heads: "mean" ranks entries by the mean over query heads, "max" by the maximum; with "union"
            each query head activates its own entries, and the query whatever any of them does.

    Returns:
        bits [N, ceil(Q / 64)] int64: bit t % 64 of word t // 64 of row j is set when query t
        activates entry j. The co-activation f(i, j) is the number of bits that rows i and j have in
        common.

    Raises:
        ArgumentError: a shape, dtype or value outside its limits, NaN or infinity in q, k or lse,
            values so large that scores may overflow float32, or an unknown name in `heads`.
    """
    return torch.ops.swarm_kv.activation_signatures(
        q, k, q_positions, sparsity, window, sinks, scale, lse, heads
    )


@typed_errors
def cluster(
    bits: Tensor,
    clusterer: str = "swarm",
    distance: str = "jaccard",
    tau: float = 0.6,
    max_size: int = 64,
    max_replicas: int = 3,
    min_activation: int = 8,
    cold: str = "coded",
    block: int = 16,
    max_index_bytes: int = 0,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Groups entries by co-activation; an entry may be in several clusters.

    The clusterers:

    - "swarm": Algorithm 1 of arXiv 2603.17803. Entries in descending density (others within tau)
      that no cluster covers yet become medoids; candidates within tau join in ascending distance
      while their mean distance to the members is within tau (Eq. 5). With more than 8,192 entries
      of `min_activation` queries or more, densities are estimated and candidates searched by
      hashing.
    - "no_replica": the same with `max_replicas` 1, whatever is asked (the paper's ablation).
    - "medoid_only": the same medoids; every other entry within tau of one joins the nearest alone,
      whatever its distance to the other members (the paper's other ablation). Groups of more than
      `max_size` are cut, nearest members first.
    - "hypergraph": entries are laid out by recursive bisection so that what a query activates lies
      in few dense runs; the pieces of the layout are the clusters, in that order, with no replicas.
    - "sequence_blocks": blocks of `max_size` neighbours; `bits` give only the number of entries.

    The distances, with f_i the bits of entry i and f_ij those that i and j share: "jaccard"
    `1 - f_ij / (f_i + f_j - f_ij)`; "conditional" `1 - f_ij / min(f_i, f_j)`; "global" `1 - f_ij /
    (sum of all f_ij)`, Eq. 2-3 as printed.

    Args:
        bits: [N, words] int64, from `activation_signatures`.
        clusterer: a name from the list above.
        distance: "jaccard", "conditional" or "global".
        tau: cluster radius, in [0, 1]. Not for "hypergraph".
        max_size: members of one cluster, >= 1.
        max_replicas: clusters that one entry may belong to, >= 1. Only for "swarm".
        min_activation: entries activated by fewer queries are cold, >= 1.
        cold: where cold entries go, and others that no cluster took: "coded" leaves them loose,
            "packed" makes clusters of `block` neighbours in sequence, "single" clusters of one.
        block: entries, >= 1.
        max_index_bytes: 4 bytes per cluster and per member; clusters that would exceed it are
            dissolved, their entries treated like cold ones, which do not count. 0: no limit. Only
            "swarm", "no_replica" and "hypergraph" look at it.
        seed: of the hashing.

    Returns:
        offsets [C + 1] int32 and members [M] int32: cluster c is
        `members[offsets[c]:offsets[c + 1]]`, its medoid first; members from `offsets[C]` on are
        loose, in sequence order. Every entry is a member at least once.

    Raises:
        ArgumentError: a shape, dtype or value outside its limits, or an unknown name.
    """
    return torch.ops.swarm_kv.cluster(
        bits,
        clusterer,
        distance,
        tau,
        max_size,
        max_replicas,
        min_activation,
        cold,
        block,
        max_index_bytes,
        seed,
    )


@typed_errors
def join_clusters(
    bits: Tensor,
    medoid_bits: Tensor,
    steps: int,
    distance: str = "jaccard",
    tau: float = 0.5,
    max_replicas: int = 3,
) -> tuple[Tensor, Tensor]:
    """Which clusters do entries that leave the window join (arXiv 2603.17803, Eq. 9)?

    The distance of entry and medoid, with f steps in which both were active and f_i, f_j in which
    either was: "jaccard" `1 - f / (f_i + f_j - f)`; "conditional" `1 - f / min(f_i, f_j)`; "global"
    `1 - f / steps`, Eq. 9 as printed, in which whatever is active most of the time is near to
    everything that is. An entry joins the nearest clusters below `tau`, at most `max_replicas`;
    without any, the nearest one; none if no medoid was ever active with it. Equal ones: the lower
    cluster. In O(N C words).

    Args:
        bits: [N, words] int64, bit t of row i: entry i was active in step t.
        medoid_bits: [C, words] int64, the same of the clusters' medoids.
        steps: observed, >= 1.
        distance: "jaccard", "conditional" or "global".
        tau: radius, in [0, 1].
        max_replicas: clusters that one entry may join, >= 1.

    Returns:
        rows [N + 1] int64 and homes int64: entry i joins `homes[rows[i]:rows[i + 1]]`, nearest
        first.

    Raises:
        ArgumentError: a shape, dtype or value outside its limits, or an unknown name.
    """
    return torch.ops.swarm_kv.join_clusters(bits, medoid_bits, steps, distance, tau, max_replicas)


@typed_errors
def score_codes(
    q: Tensor, codebooks: Tensor, codes: Tensor, scale: float, turn: Tensor | None = None
) -> Tensor:
    """Scores every entry by its product-quantised key.

    `score[n] = mean_{h, s} softmax_n(scale * q[h, s] . key[n])`, where key[n] is put together from
    the codewords `codebooks[kv, m, codes[kv, m, n]]` of its M parts. One table of q . codeword per
    part turns the product into M additions. Computed in float32.

    Args:
        q: [Hq, S, D] floating; the S >= 1 queries are treated alike (a batch that shares the
            context, or several steps).
        codebooks: [Hkv, M, K, D / M] float32, K <= 256.
        codes: [Hkv, M, N] uint8, below K.
        scale: multiplies q . key.
        turn: [Hkv, D, D] floating, what codes of turned keys need (`swarm_kv.codes`): each query
            is first multiplied by its KV head's matrix, as a row. None: not at all.

    Returns:
        [N] float32, summing to 1.

    Raises:
        ArgumentError: a shape, dtype or code outside its limits.
    """
    return torch.ops.swarm_kv.score_codes(q, codebooks, codes, scale, turn)


@typed_errors
def score_packed_codes(
    q: Tensor, codebooks: Tensor, codes: Tensor, scale: float, turn: Tensor | None = None
) -> Tensor:
    """`score_codes` for codes of four bits, two to a byte: about three times as fast.

    The tables of `scale * q . codeword` are rounded: to multiples of a step that is, for each query
    row, the greatest range of a part's sixteen values divided by 127. A logit is thus off by at
    most M / 2 steps (and by about sqrt(M / 12) of them in general), a weight by another 1 %.

    Args:
        q: [Hq, S, D] floating.
        codebooks: [Hkv, M, 16, D / M] float32, M even and at most 516.
        codes: [Hkv, M / 2, N] uint8: byte m holds the code of part 2m in its low half and that of
            part 2m + 1 in its high half.
        scale: multiplies q . key.
        turn: see `score_codes`.

    Returns:
        [N] float32, summing to 1 within 1 %.

    Raises:
        ArgumentError: a shape or dtype outside its limits.
    """
    return torch.ops.swarm_kv.score_packed_codes(q, codebooks, codes, scale, turn)


@typed_errors
def score_clusters(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Scores clusters by their medoids' keys (arXiv 2603.17803, section 5.2).

    `score[c] = mean_{h, s} softmax_c(scale * q[h, s] . keys[kv(h), c])`, computed in float32.

    Args:
        q: [Hq, S, D] floating, S >= 1.
        keys: [Hkv, C, D] floating.
        scale: multiplies q . key.

    Returns:
        [C] float32, summing to 1.

    Raises:
        ArgumentError: a shape or dtype outside its limits.
    """
    return torch.ops.swarm_kv.score_clusters(q, keys, scale)


@typed_errors
def score_coded_clusters(q: Tensor, keys: Tensor, scales: Tensor, scale: float) -> Tensor:
    """`score_clusters` for keys of four bits, read as they are packed.

    Feature d of a key is `steps[d] * scales[kv, d]` plus a number that is the same for all clusters
    and therefore nothing to a softmax.

    Args:
        q: [Hq, S, D] floating, S >= 1, D even.
        keys: [Hkv, C, D / 2] uint8: byte j holds the steps of feature j in its low half and of
            feature j + D / 2 in its high half.
        scales: [Hkv, D] float32.
        scale: multiplies q . key.

    Returns:
        [C] float32, summing to 1.

    Raises:
        ArgumentError: a shape or dtype outside its limits.
    """
    return torch.ops.swarm_kv.score_coded_clusters(q, keys, scales, scale)


@typed_errors
def select_clusters(scores: Tensor, offsets: Tensor, members: Tensor, budget: int) -> Tensor:
    """Takes clusters by descending score until they hold `budget` distinct entries (section 5.2).

    Args:
        scores: [C] floating, compared in float32; no NaN.
        offsets: [C + 1] int32, from `cluster`.
        members: [M] int32, from `cluster`; those beyond `offsets[C]` are in no cluster and never
            taken.
        budget: entries, >= 0. The last cluster may exceed it; all clusters are taken if they hold
            fewer.

    Returns:
        Cluster ids, int64, in the order taken; equal scores in ascending id.

    Raises:
        ArgumentError: a shape, dtype or value outside its limits.
    """
    return torch.ops.swarm_kv.select_clusters(scores, offsets, members, budget)


@typed_errors
def select_intervals(
    probs: Tensor, members: Tensor, budget: int, request_cost: float = 1.5
) -> Tensor:
    """Takes intervals of the order in which the entries lie, each to be read in one request.

    Positions of `members` are taken in intervals, all that lies inside one along with it, such that
    `sum of probabilities - lambda * (request_cost * intervals + positions)` is greatest; with the
    smallest lambda for which they hold at most `budget` distinct entries. Intervals only grow while
    lambda falls. What the next lambda would add is more than the rest of the budget: of the first
    run of it (equal lambdas: lower positions first) that does not fit, neighbours are taken, those
    of the greatest sum of probabilities. The objective then is within `2 * lambda * request_cost`
    of the optimum at that lambda.

    Where an entry lies in several places, its probability counts at the first one, and the others
    are taken only along with their neighbours. In O(M).

    Args:
        probs: [N] floating, finite and >= 0, such as from `score_codes`; compared in float32.
        members: [M] int32, below N: entries in the order in which they lie, such as from `cluster`.
        budget: entries, >= 0.
        request_cost: what one more request costs, in transfer times of one entry, >= 0. With 0
            these are the entries of highest probability (equal ones: lower position).

    Returns:
        Entries, int64, ascending: exactly `budget` of them, or all distinct members where these are
        fewer.

    Raises:
        ArgumentError: a shape, dtype or value outside its limits.
    """
    return torch.ops.swarm_kv.select_intervals(probs, members, budget, request_cost)


@typed_errors
def select_two_level(
    probs: Tensor,
    offsets: Tensor,
    members: Tensor,
    budget: int,
    request_cost: float = 1.5,
    single_share: float = 0.3,
) -> tuple[Tensor, Tensor]:
    """Takes clusters by gain per I/O cost, then the strongest entries outside them one by one.

    A cluster's gain is `sum(probs of its members not taken yet) / (request_cost + size)`, with
    `size` all of its members: it is read whole. The cluster of greatest gain (equal gains: lower
    id) is taken until `budget - floor(single_share * budget)` distinct entries are, or no cluster
    gains anything. Entries of highest probability that are not among them (equal ones: lower id)
    fill up the budget; entries in no cluster are taken in this way only.

    Args:
        probs: [N] floating, >= 0, such as from `score_codes`; compared in float32; no NaN.
        offsets: [C + 1] int32, from `cluster`.
        members: [M] int32, below N, from `cluster`.
        budget: entries, >= 0. The last cluster may exceed it.
        request_cost: what one more request costs, in transfer times of one entry, >= 0.
        single_share: share of the budget that is left for single entries, in [0, 1].

    Returns:
        clusters: ids, int64, in the order taken.
        entries: the single entries, int64, ascending; none of them is a member of the clusters.
        A budget of N or more gives no clusters and all N entries.

    Raises:
        ArgumentError: a shape, dtype or value outside its limits.
    """
    return torch.ops.swarm_kv.select_two_level(
        probs, offsets, members, budget, request_cost, single_share
    )


@typed_errors
def sparse_attention(
    q: Tensor,
    pool: Tensor,
    slots: Tensor,
    row_offsets: Tensor,
    kv_heads: int,
    scale: float,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a few query rows, each over its own list of entries in a pool.

    With `s_i = scale * q . k_i` (or `softcap * tanh(s_i / softcap)`), `lse = log(sum_i exp(s_i) [+
    exp(sink)])` and `out = sum_i exp(s_i - lse) v_i`. Accumulated in float32, or in float64 for
    float64.

    Both results are differentiable in q, pool and sinks, also twice. The gradient of the pool has
    its shape: entries in several lists, or several times in one, add up, the rest is 0. Keys and
    values get gradients where the pool is made of them, `torch.stack([k, v], 1).flatten()` of [N,
    Hkv, D]. A store's pool takes none; what was read from it is copied for the backward, so slots
    may be given back after the call.

    On a CUDA device, which all arguments share, D is 64, 128 or 256, float64 is refused, and the
    pool and each entry begin at a multiple of 16 bytes. Slots are looked at there alone, since the
    host would have to wait for them: a row with one that reaches outside the pool becomes NaN.

    Args:
        q: [R, Hq, D] floating.
        pool: [elements] of q's dtype, contiguous. An entry is `[K | V]`, `kv_heads * D` elements
            each.
        slots: [total] int64, the element of the pool at which each entry starts.
        row_offsets: [R + 1] int64: row r attends to `slots[row_offsets[r]:row_offsets[r + 1]]`.
        kv_heads: Hkv, a divisor of Hq.
        scale: multiplies q . k.
        sinks: [Hq] floating, one further logit per head that has no value (gpt-oss), or None.
        softcap: positive, or None for no cap.

    Returns:
        out [R, Hq, D] and lse [R, Hq] (natural logarithm), in the dtype of accumulation. A row
        without entries gives out 0 and lse -inf, or the sink.

    Raises:
        ArgumentError: a shape, dtype or value outside its limits, such as an entry that reaches
            outside the pool.
    """
    return torch.ops.swarm_kv.sparse_attention(
        q, pool, slots, row_offsets, kv_heads, scale, sinks, softcap
    )


@typed_errors
def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Joins two attentions of the same queries over disjoint entries.

    `lse = log(exp(lse_a) + exp(lse_b))` and `out = exp(lse_a - lse) out_a + exp(lse_b - lse)
    out_b`. A side with lse -inf counts for nothing; where both have it, out is 0 and lse -inf. Runs
    on CPU and CUDA. Both results are differentiable in all four arguments, also twice.

    Args:
        out_a: [..., D] float32 or float64.
        lse_a: [...], of the same dtype and device.
        out_b: like out_a.
        lse_b: like lse_a.

    Returns:
        out like out_a and lse like lse_a.

    Raises:
        ArgumentError: a shape, dtype or device that does not match.
    """
    return torch.ops.swarm_kv.merge_attention(out_a, lse_a, out_b, lse_b)


def _check_argument(
    op: str, name: str, tensor: Tensor, dims: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    torch._check(
        tensor.dim() == dims,
        lambda: f"{op}: {name} must have {dims} dimensions, got {tensor.dim()}",
    )
    torch._check(
        tensor.dtype in dtypes,
        lambda: f"{op}: {name} must be one of {dtypes}, got {tensor.dtype}",
    )


def _check_equal(op: str, what: str, left: int, right: int) -> None:
    torch._check(left == right, lambda: f"{op}: {what} must be equal, got {left} and {right}")


@torch.library.register_fake("swarm_kv::activation_signatures")
def _(  # type: ignore[no-untyped-def]
    q, k, q_positions, sparsity, window, sinks, scale, lse=None, heads="mean"
):
    op = "activation_signatures"
    _check_argument(op, "q", q, 3, _FLOATING)
    _check_argument(op, "k", k, 3, _FLOATING)
    _check_argument(op, "q_positions", q_positions, 1, (torch.int64,))
    _check_equal(op, "the features of q and k", q.size(2), k.size(2))
    _check_equal(op, "the queries of q and q_positions", q.size(1), q_positions.size(0))
    if lse is not None:
        _check_argument(op, "lse", lse, 2, _FLOATING)
        _check_equal(op, "the heads of q and lse", q.size(0), lse.size(0))
        _check_equal(op, "the queries of q and lse", q.size(1), lse.size(1))
    return q_positions.new_empty((k.size(1), (q.size(1) + 63) // 64))


@torch.library.register_fake("swarm_kv::cluster")
def _(bits, *options):  # type: ignore[no-untyped-def]
    _check_argument("cluster", "bits", bits, 2, (torch.int64,))
    context = torch.library.get_ctx()
    return (
        # offsets: clusters + 1
        bits.new_empty((context.new_dynamic_size(min=1),), dtype=torch.int32),
        bits.new_empty((context.new_dynamic_size(),), dtype=torch.int32),
    )


@torch.library.register_fake("swarm_kv::join_clusters")
def _(bits, medoid_bits, *options):  # type: ignore[no-untyped-def]
    op = "join_clusters"
    _check_argument(op, "bits", bits, 2, (torch.int64,))
    _check_argument(op, "medoid_bits", medoid_bits, 2, (torch.int64,))
    _check_equal(op, "the words of bits and medoid_bits", bits.size(1), medoid_bits.size(1))
    homes = bits.new_empty((torch.library.get_ctx().new_dynamic_size(),))
    return bits.new_empty((bits.size(0) + 1,)), homes


@torch.library.register_fake("swarm_kv::score_codes")
def _(q, codebooks, codes, scale, turn=None):  # type: ignore[no-untyped-def]
    op = "score_codes"
    _check_argument(op, "q", q, 3, _FLOATING)
    _check_argument(op, "codebooks", codebooks, 4, (torch.float32,))
    _check_argument(op, "codes", codes, 3, (torch.uint8,))
    if turn is not None:
        _check_argument(op, "turn", turn, 3, _FLOATING)
    _check_equal(op, "the KV heads of codebooks and codes", codebooks.size(0), codes.size(0))
    _check_equal(op, "the parts of codebooks and codes", codebooks.size(1), codes.size(1))
    _check_equal(
        op, "the features of q and codebooks", q.size(2), codebooks.size(1) * codebooks.size(3)
    )
    return codebooks.new_empty((codes.size(2),))


@torch.library.register_fake("swarm_kv::score_packed_codes")
def _(q, codebooks, codes, scale, turn=None):  # type: ignore[no-untyped-def]
    op = "score_packed_codes"
    _check_argument(op, "q", q, 3, _FLOATING)
    _check_argument(op, "codebooks", codebooks, 4, (torch.float32,))
    _check_argument(op, "codes", codes, 3, (torch.uint8,))
    if turn is not None:
        _check_argument(op, "turn", turn, 3, _FLOATING)
    _check_equal(op, "codebooks' codewords and 16", codebooks.size(2), 16)
    _check_equal(op, "the KV heads of codebooks and codes", codebooks.size(0), codes.size(0))
    _check_equal(op, "codebooks' parts and two per byte", codebooks.size(1), 2 * codes.size(1))
    _check_equal(
        op, "the features of q and codebooks", q.size(2), codebooks.size(1) * codebooks.size(3)
    )
    return codebooks.new_empty((codes.size(2),))


@torch.library.register_fake("swarm_kv::score_clusters")
def _(q, keys, scale):  # type: ignore[no-untyped-def]
    op = "score_clusters"
    _check_argument(op, "q", q, 3, _FLOATING)
    _check_argument(op, "keys", keys, 3, _FLOATING)
    _check_equal(op, "the features of q and keys", q.size(2), keys.size(2))
    return keys.new_empty((keys.size(1),), dtype=torch.float32)


@torch.library.register_fake("swarm_kv::score_coded_clusters")
def _(q, keys, scales, scale):  # type: ignore[no-untyped-def]
    op = "score_coded_clusters"
    _check_argument(op, "q", q, 3, _FLOATING)
    _check_argument(op, "keys", keys, 3, (torch.uint8,))
    _check_argument(op, "scales", scales, 2, (torch.float32,))
    _check_equal(op, "the KV heads of keys and scales", keys.size(0), scales.size(0))
    _check_equal(op, "the features of q and scales", q.size(2), scales.size(1))
    _check_equal(op, "the features of q and two per byte", q.size(2), 2 * keys.size(2))
    return scales.new_empty((keys.size(1),))


@torch.library.register_fake("swarm_kv::select_clusters")
def _(scores, offsets, members, budget):  # type: ignore[no-untyped-def]
    op = "select_clusters"
    _check_argument(op, "scores", scores, 1, _FLOATING)
    _check_argument(op, "offsets", offsets, 1, (torch.int32,))
    _check_argument(op, "members", members, 1, (torch.int32,))
    _check_equal(op, "offsets' length and scores' + 1", offsets.size(0), scores.size(0) + 1)
    return offsets.new_empty((torch.library.get_ctx().new_dynamic_size(),), dtype=torch.int64)


@torch.library.register_fake("swarm_kv::select_intervals")
def _(probs, members, budget, request_cost):  # type: ignore[no-untyped-def]
    op = "select_intervals"
    _check_argument(op, "probs", probs, 1, _FLOATING)
    _check_argument(op, "members", members, 1, (torch.int32,))
    return members.new_empty((torch.library.get_ctx().new_dynamic_size(),), dtype=torch.int64)


@torch.library.register_fake("swarm_kv::select_two_level")
def _(probs, offsets, members, budget, request_cost, single_share):  # type: ignore[no-untyped-def]
    op = "select_two_level"
    _check_argument(op, "probs", probs, 1, _FLOATING)
    _check_argument(op, "offsets", offsets, 1, (torch.int32,))
    _check_argument(op, "members", members, 1, (torch.int32,))
    context = torch.library.get_ctx()
    return (
        offsets.new_empty((context.new_dynamic_size(),), dtype=torch.int64),
        offsets.new_empty((context.new_dynamic_size(),), dtype=torch.int64),
    )


@torch.library.register_fake("swarm_kv::sparse_attention")
def _(  # type: ignore[no-untyped-def]
    q, pool, slots, row_offsets, kv_heads, scale, sinks=None, softcap=None
):
    op = "sparse_attention"
    _check_argument(op, "q", q, 3, _FLOATING)
    _check_argument(op, "pool", pool, 1, (q.dtype,))
    _check_argument(op, "slots", slots, 1, (torch.int64,))
    _check_argument(op, "row_offsets", row_offsets, 1, (torch.int64,))
    _check_equal(op, "row_offsets' length and q's rows + 1", row_offsets.size(0), q.size(0) + 1)
    if sinks is not None:
        _check_argument(op, "sinks", sinks, 1, _FLOATING)
        _check_equal(op, "the heads of sinks and q", sinks.size(0), q.size(1))
    dtype = accumulation_dtype(q.dtype)
    return q.new_empty(tuple(q.shape), dtype=dtype), q.new_empty(tuple(q.shape[:2]), dtype=dtype)


@torch.library.register_fake("swarm_kv::merge_attention")
def _(out_a, lse_a, out_b, lse_b):  # type: ignore[no-untyped-def]
    op = "merge_attention"
    dtypes = (torch.float32, torch.float64)
    _check_argument(op, "out_a", out_a, out_a.dim(), dtypes)
    _check_argument(op, "lse_a", lse_a, out_a.dim() - 1, (out_a.dtype,))
    _check_argument(op, "out_b", out_b, out_a.dim(), (out_a.dtype,))
    _check_argument(op, "lse_b", lse_b, out_a.dim() - 1, (out_a.dtype,))
    for axis in range(out_a.dim() - 1):
        _check_equal(op, f"dimension {axis} of out_a and lse_a", out_a.size(axis), lse_a.size(axis))
        _check_equal(op, f"dimension {axis} of out_a and lse_b", out_a.size(axis), lse_b.size(axis))
    for axis in range(out_a.dim()):
        _check_equal(op, f"dimension {axis} of out_a and out_b", out_a.size(axis), out_b.size(axis))
    return (
        out_a.new_empty(tuple(out_a.shape)),
        lse_a.new_empty(tuple(lse_a.shape)),
    )
