"""Plain PyTorch implementations of the operators: what `swarm_kv.ops` means, to be read.

Each function has the signature of the operator of the same name and computes in float64; results
are compared with the operators' to within the rounding of their dtype. They are quadratic and slow
on purpose.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "activation_signatures",
    "cluster",
    "gather_entries",
    "merge_attention",
    "score_clusters",
    "score_codes",
    "select_clusters",
    "select_two_level",
    "sparse_attention",
    "unpack_bits",
]


def _repeat_heads(kv: Tensor, heads: int) -> Tensor:
    """[Hkv, ...] to [Hq, ...]: query head h uses KV head h // (Hq // Hkv)."""
    return kv.repeat_interleave(heads // kv.size(0), dim=0)


def activation_signatures(
    q: Tensor,
    k: Tensor,
    q_positions: Tensor,
    sparsity: float = 0.10,
    window: int = 256,
    sinks: int = 0,
    scale: float = 1.0,
) -> Tensor:
    """See `swarm_kv.ops.activation_signatures`."""
    heads, queries, _ = q.shape
    entries = k.size(1)
    scores = scale * torch.einsum("hqd,hnd->hqn", q.double(), _repeat_heads(k.double(), heads))
    position = torch.arange(entries)
    seen = position[None, :] <= q_positions[:, None]
    probs = scores.masked_fill(~seen, -math.inf).softmax(-1).mean(0)
    eligible = seen & (position >= sinks) & (position[None, :] <= q_positions[:, None] - window)
    budget = max(1, math.floor(sparsity * entries + 0.5))
    bits = torch.zeros(entries, (queries + 63) // 64, dtype=torch.int64)
    for t in range(queries):
        candidates = [int(j) for j in torch.nonzero(eligible[t] & (probs[t] > 0)).flatten()]
        candidates.sort(key=lambda j: (-probs[t, j].item(), j))
        for j in candidates[:budget]:
            bit = 1 << (t % 64)
            bits[j, t // 64] |= bit - (1 << 64) if bit == 1 << 63 else bit
    return bits


def unpack_bits(bits: Tensor) -> Tensor:
    """Signatures [N, words] int64 as a bool matrix [N, 64 * words]."""
    shifts = torch.arange(64)
    return ((bits[:, :, None] >> shifts) & 1).bool().flatten(1)


def cluster(
    bits: Tensor,
    tau: float = 0.6,
    max_size: int = 64,
    max_replicas: int = 3,
    min_activation: int = 8,
) -> tuple[Tensor, Tensor]:
    """See `swarm_kv.ops.cluster`."""
    matrix = unpack_bits(bits).double()
    counts = matrix.sum(1)
    common = matrix @ matrix.T
    union = counts[:, None] + counts[None, :] - common
    distance = torch.where(union > 0, 1 - common / union.clamp(min=1), torch.ones_like(union))
    warm = [i for i in range(len(counts)) if counts[i] >= min_activation]
    near = {i: [j for j in warm if j != i and distance[i, j] <= tau] for i in warm}
    copies = dict.fromkeys(warm, 0)
    clusters: list[list[int]] = []
    for medoid in sorted(warm, key=lambda i: (-len(near[i]), i)):
        if copies[medoid] > 0:
            continue
        members = [medoid]
        for j in sorted(near[medoid], key=lambda j: (distance[medoid, j].item(), j)):
            if len(members) >= max_size:
                break
            mean = distance[j, members].sum().item() / len(members)
            if copies[j] < max_replicas and mean <= tau:
                members.append(j)
        for j in members:
            copies[j] += 1
        clusters.append(members)
    clusters += [[i] for i in range(len(counts)) if counts[i] < min_activation]
    offsets = torch.tensor([0, *(len(c) for c in clusters)]).cumsum(0)
    return offsets, torch.tensor([j for c in clusters for j in c], dtype=torch.int64)


def score_clusters(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """See `swarm_kv.ops.score_clusters`."""
    logits = torch.einsum("hsd,hcd->hsc", q.double(), _repeat_heads(keys.double(), q.size(0)))
    return (scale * logits).softmax(-1).mean((0, 1)).float()


def score_codes(q: Tensor, codebooks: Tensor, codes: Tensor, scale: float) -> Tensor:
    """See `swarm_kv.ops.score_codes`."""
    kv_heads, parts, _, _ = codebooks.shape
    keys = torch.stack(
        [
            torch.cat([codebooks[g, m][codes[g, m].long()] for m in range(parts)], dim=-1)
            for g in range(kv_heads)
        ]
    )
    return score_clusters(q, keys, scale)


def _members_of(offsets: Tensor, members: Tensor, index: int) -> list[int]:
    return [int(j) for j in members[int(offsets[index]) : int(offsets[index + 1])]]


def select_clusters(scores: Tensor, offsets: Tensor, members: Tensor, budget: int) -> Tensor:
    """See `swarm_kv.ops.select_clusters`."""
    scores = scores.float()
    taken: set[int] = set()
    result: list[int] = []
    for c in sorted(range(len(scores)), key=lambda c: (-scores[c].item(), c)):
        if len(taken) >= budget:
            break
        taken.update(_members_of(offsets, members, c))
        result.append(c)
    return torch.tensor(result, dtype=torch.int64)


def select_two_level(
    probs: Tensor,
    offsets: Tensor,
    members: Tensor,
    budget: int,
    request_cost: float = 1.5,
    single_share: float = 0.3,
) -> tuple[Tensor, Tensor]:
    """See `swarm_kv.ops.select_two_level`."""
    probs = probs.float()
    entries = len(probs)
    if budget >= entries:
        return torch.empty(0, dtype=torch.int64), torch.arange(entries)
    lists = [_members_of(offsets, members, c) for c in range(len(offsets) - 1)]
    gain = [
        torch.tensor(
            sum(probs[j].item() for j in entry_list) / (request_cost + len(entry_list))
            if entry_list
            else 0.0
        ).item()
        for entry_list in lists
    ]
    cluster_budget = budget - int(single_share * budget)
    taken: set[int] = set()
    result: list[int] = []
    for c in sorted(range(len(lists)), key=lambda c: (-gain[c], c)):
        if len(taken) >= cluster_budget:
            break
        new = sum(j not in taken for j in lists[c])
        if not lists[c] or 2 * new < len(lists[c]):
            continue
        taken.update(lists[c])
        result.append(c)
    rest = [j for j in range(entries) if j not in taken]
    rest.sort(key=lambda j: (-probs[j].item(), j))
    singles = sorted(rest[: max(0, budget - len(taken))])
    return torch.tensor(result, dtype=torch.int64), torch.tensor(singles, dtype=torch.int64)


def gather_entries(pool: Tensor, slots: Tensor, entry_elements: int) -> Tensor:
    """See `swarm_kv.store_ops.gather_entries`."""
    return pool[slots[:, None] + torch.arange(entry_elements)]


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
    """See `swarm_kv.ops.sparse_attention`."""
    rows, heads, dim = q.shape
    half = kv_heads * dim
    out = torch.zeros(rows, heads, dim, dtype=torch.float64)
    lse = torch.full((rows, heads), -math.inf, dtype=torch.float64)
    for r in range(rows):
        own = slots[int(row_offsets[r]) : int(row_offsets[r + 1])]
        entries = pool.double()[own[:, None] + torch.arange(2 * half)]
        keys, values = entries.view(-1, 2, kv_heads, dim).permute(1, 2, 0, 3)
        scores = scale * torch.einsum("hd,hnd->hn", q[r].double(), _repeat_heads(keys, heads))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
        lse[r] = scores.logsumexp(-1)
        weights = (scores - lse[r][:, None].nan_to_num(neginf=0.0)).exp()[:, : len(own)]
        out[r] = torch.einsum("hn,hnd->hd", weights, _repeat_heads(values, heads))
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out.to(dtype), lse.to(dtype)


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """See `swarm_kv.ops.merge_attention`."""
    lse = torch.logaddexp(lse_a.double(), lse_b.double())
    shift = lse.nan_to_num(neginf=0.0)
    weight_a = (lse_a.double() - shift).exp()[..., None]
    weight_b = (lse_b.double() - shift).exp()[..., None]
    out = weight_a * out_a.double() + weight_b * out_b.double()
    return out.to(out_a.dtype), lse.to(lse_a.dtype)
