"""Plain PyTorch implementations of the operators: what `swarm_kv.ops` means, to be read.

Each function has the signature of the operator of the same name and computes in float64; results
are compared with the operators' to within the rounding of their dtype. They are quadratic and slow
on purpose.
"""

from __future__ import annotations

import bisect
import collections
import itertools
import math

import torch
from torch import Tensor

__all__ = [
    "activation_signatures",
    "cluster",
    "decode_entries",
    "encode_entries",
    "gather_entries",
    "join_clusters",
    "merge_attention",
    "score_clusters",
    "score_coded_clusters",
    "score_codes",
    "score_packed_codes",
    "select_clusters",
    "select_intervals",
    "select_two_level",
    "simulate_reads",
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
    lse: Tensor | None = None,
    heads: str = "mean",
) -> Tensor:
    """See `swarm_kv.ops.activation_signatures`."""
    queries, entries = q.size(1), k.size(1)
    scores = scale * torch.einsum("hqd,hnd->hqn", q.double(), _repeat_heads(k.double(), q.size(0)))
    position = torch.arange(entries)
    seen = position[None, :] <= q_positions[:, None]
    scores = scores.masked_fill(~seen, -math.inf)
    mass = scores.logsumexp(-1) if lse is None else lse.double()
    probs = (scores - mass[..., None]).clamp(max=0.0).exp()
    rankings = {"mean": probs.mean(0, True), "max": probs.amax(0, True), "union": probs}[heads]
    eligible = seen & (position >= sinks) & (position[None, :] <= q_positions[:, None] - window)
    budget = max(1, math.floor(sparsity * entries + 0.5))
    bits = torch.zeros(entries, (queries + 63) // 64, dtype=torch.int64)
    for t in range(queries):
        bit = 1 << (t % 64)
        for ranking in rankings[:, t]:
            candidates = [int(j) for j in torch.nonzero(eligible[t] & (ranking > 0)).flatten()]
            candidates.sort(key=lambda j: (-ranking[j].item(), j))
            for j in candidates[:budget]:
                bits[j, t // 64] |= bit - (1 << 64) if bit == 1 << 63 else bit
    return bits


def unpack_bits(bits: Tensor) -> Tensor:
    """Signatures [N, words] int64 as a bool matrix [N, 64 * words]."""
    shifts = torch.arange(64)
    return ((bits[:, :, None] >> shifts) & 1).bool().flatten(1)


def _distances(matrix: Tensor, distance: str) -> Tensor:
    """Distances [N, N] of signatures given as a 0/1 matrix [N, queries]."""
    counts = matrix.sum(1)
    common = matrix @ matrix.T
    if distance == "jaccard":
        whole = counts[:, None] + counts[None, :] - common
    elif distance == "conditional":
        whole = torch.minimum(counts[:, None], counts[None, :])
    else:
        assert distance == "global"
        whole = common.triu(1).sum().expand_as(common)
    return 1 - common / whole.clamp(min=1)


def _algorithm_1(
    distance: Tensor, warm: list[int], tau: float, max_size: int, max_replicas: int
) -> list[list[int]]:
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
        if len(members) > 1:
            for j in members:
                copies[j] += 1
            clusters.append(members)
    return clusters


def _nearest_medoid(
    distance: Tensor, warm: list[int], tau: float, max_size: int
) -> list[list[int]]:
    density = {i: sum(int(distance[i, j] <= tau) for j in warm if j != i) for i in warm}
    medoids: list[int] = []
    for i in sorted(warm, key=lambda i: (-density[i], i)):
        if all(distance[m, i] > tau for m in medoids):
            medoids.append(i)
    groups: dict[int, list[int]] = {m: [] for m in medoids}
    for i in warm:
        if i not in groups:
            groups[min(medoids, key=lambda m: distance[m, i].item())].append(i)
    clusters: list[list[int]] = []
    for m, group in groups.items():
        ordered = [m, *sorted(group, key=lambda i: (distance[m, i].item(), i))]
        pieces = [ordered[i : i + max_size] for i in range(0, len(ordered), max_size)]
        clusters += [piece for piece in pieces if len(piece) > 1]
    return clusters


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
    """See `swarm_kv.ops.cluster`. Exact for any number of entries; "hypergraph" has no reference.

    Raises:
        NotImplementedError: the clusterer is "hypergraph".
    """
    matrix = unpack_bits(bits).double()
    entries = len(matrix)
    warm = [i for i in range(entries) if matrix[i].sum() >= min_activation]
    clusters: list[list[int]]
    if clusterer == "sequence_blocks":
        clusters = [list(range(entries))[i : i + max_size] for i in range(0, entries, max_size)]
    elif clusterer == "medoid_only":
        clusters = _nearest_medoid(_distances(matrix, distance), warm, tau, max_size)
    elif clusterer in ("swarm", "no_replica"):
        copies = 1 if clusterer == "no_replica" else max_replicas
        clusters = _algorithm_1(_distances(matrix, distance), warm, tau, max_size, copies)
        if max_index_bytes > 0:
            sizes = torch.tensor([4 * (1 + len(c)) for c in clusters])
            clusters = clusters[: int((sizes.cumsum(0) <= max_index_bytes).sum())]
    else:
        raise NotImplementedError(f"there is no reference of the clusterer {clusterer!r}")
    covered = {j for c in clusters for j in c}
    rest = [i for i in range(entries) if i not in covered]
    size = {"packed": block, "single": 1}.get(cold)
    if size is not None:
        clusters += [rest[i : i + size] for i in range(0, len(rest), size)]
        rest = []
    offsets = torch.tensor([0, *(len(c) for c in clusters)]).cumsum(0, dtype=torch.int32)
    members = [j for c in clusters for j in c] + rest
    return offsets, torch.tensor(members, dtype=torch.int32)


def score_clusters(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """See `swarm_kv.ops.score_clusters`."""
    logits = torch.einsum("hsd,hcd->hsc", q.double(), _repeat_heads(keys.double(), q.size(0)))
    return (scale * logits).softmax(-1).mean((0, 1)).float()


def score_coded_clusters(q: Tensor, keys: Tensor, scales: Tensor, scale: float) -> Tensor:
    """See `swarm_kv.ops.score_coded_clusters`."""
    steps = torch.cat([keys & 15, keys >> 4], dim=-1)
    return score_clusters(q, steps * scales[:, None].double(), scale)


def _turned(q: Tensor, turn: Tensor | None) -> Tensor:
    """Each query times the matrix of its KV head."""
    if turn is None:
        return q.float()
    groups = q.float().reshape(turn.shape[0], -1, turn.shape[1])
    return (groups @ turn.float()).view(q.shape)


def score_codes(
    q: Tensor, codebooks: Tensor, codes: Tensor, scale: float, turn: Tensor | None = None
) -> Tensor:
    """See `swarm_kv.ops.score_codes`."""
    kv_heads, parts, _, _ = codebooks.shape
    q = _turned(q, turn)
    keys = torch.stack(
        [
            torch.cat([codebooks[g, m][codes[g, m].long()] for m in range(parts)], dim=-1)
            for g in range(kv_heads)
        ]
    )
    return score_clusters(q, keys, scale)


def score_packed_codes(
    q: Tensor, codebooks: Tensor, codes: Tensor, scale: float, turn: Tensor | None = None
) -> Tensor:
    """See `swarm_kv.ops.score_packed_codes`."""
    kv_heads, parts, _, size = codebooks.shape
    unpacked = torch.stack([codes & 15, codes >> 4], dim=2).view(kv_heads, parts, -1).long()
    rows = _turned(q, turn).reshape(kv_heads, -1, parts, size)
    tables = scale * torch.einsum("grmd,gmkd->grmk", rows, codebooks)
    tables = tables - tables.amin(-1, keepdim=True)
    step = tables.amax((-2, -1), keepdim=True) / 127
    rounded = (tables / step.clamp(min=1e-30) + 0.5).floor() * step
    index = unpacked[:, None].expand(-1, rows.shape[1], -1, -1)
    logits = rounded.gather(-1, index).sum(2)
    return logits.double().softmax(-1).mean((0, 1)).float()


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
    cluster_budget = budget - int(single_share * budget)
    taken: set[int] = set()
    result: list[int] = []

    def gain(c: int) -> float:
        mass = sum(probs[j].item() for j in lists[c] if j not in taken)
        return torch.tensor(mass / (request_cost + len(lists[c])) if mass else 0.0).item()

    while lists and len(taken) < cluster_budget:
        best = max(range(len(lists)), key=lambda c: (gain(c), -c))
        if gain(best) == 0:
            break
        taken.update(lists[best])
        result.append(best)
    rest = [j for j in range(entries) if j not in taken]
    rest.sort(key=lambda j: (-probs[j].item(), j))
    singles = sorted(rest[: max(0, budget - len(taken))])
    return torch.tensor(result, dtype=torch.int64), torch.tensor(singles, dtype=torch.int64)


def best_intervals(probs: list[float], price: float, request_cost: float) -> list[bool]:
    """Positions in the set of intervals that maximises `sum of probabilities - price * cost`.

    The cost is `request_cost` per interval and one per position; of equal sets the smaller.
    """
    # Best value of the positions so far, with the last one outside or inside an interval.
    outside, inside = 0.0, -math.inf
    came_from_inside: list[tuple[bool, bool]] = []
    for p in probs:
        opened = outside - price * request_cost
        came_from_inside.append((inside > outside, inside > opened))
        outside, inside = max(outside, inside), max(opened, inside) + p - price
    taken = [False] * len(probs)
    state = inside > outside
    for i in reversed(range(len(probs))):
        taken[i] = state
        state = came_from_inside[i][state]
    return taken


def interval_prices(
    probs: Tensor, members: Tensor, budget: int, request_cost: float
) -> tuple[list[float], float, float]:
    """What each position brings, and the price at which the budget ends, from below and from above.

    A copy of an earlier entry brings nothing, but for the millionth of the mean that is added
    everywhere. For 0 < budget < distinct members.
    """
    held = members.tolist()
    p = probs.float().double()
    least = 1e-6 * p.sum().item() / len(p) or 1.0
    values = [p[e].item() * (e not in held[:i]) + least for i, e in enumerate(held)]
    # All positions are taken where one costs less than any brings, none where it costs the most.
    low, high = least / 2, max(values)
    for _ in range(200):
        middle = math.sqrt(low * high)
        taken = best_intervals(values, middle, request_cost)
        if len({e for e, t in zip(held, taken, strict=True) if t}) <= budget:
            high = middle
        else:
            low = middle
    return values, low, high


def select_intervals(
    probs: Tensor, members: Tensor, budget: int, request_cost: float = 1.5
) -> Tensor:
    """See `swarm_kv.ops.select_intervals`."""
    held = members.tolist()
    p = probs.float().tolist()
    if budget == 0 or budget >= len(set(held)):
        return torch.tensor(sorted(set(held)) if budget else [], dtype=torch.int64)
    if request_cost == 0:
        strongest = sorted(dict.fromkeys(held), key=lambda e: -p[e])  # ties: lower position
        return torch.tensor(sorted(strongest[:budget]), dtype=torch.int64)
    values, low, high = interval_prices(probs, members, budget, request_cost)
    before = best_intervals(values, high, request_cost)
    after = best_intervals(values, low, request_cost)
    taken = {e for e, t in zip(held, before, strict=True) if t}
    i = 0
    while i < len(held):
        fresh: list[int] = []
        while i < len(held) and after[i] and not before[i]:
            fresh += [held[i]] * (held[i] not in taken and held[i] not in fresh)
            i += 1
        left = min(budget - len(taken), len(fresh))
        windows = [fresh[j : j + left] for j in range(len(fresh) - left + 1)]
        taken.update(max(windows, key=lambda window: math.fsum(p[e] for e in window)))
        i += 1
    return torch.tensor(sorted(taken), dtype=torch.int64)


def join_clusters(
    bits: Tensor,
    medoid_bits: Tensor,
    steps: int,
    distance: str = "jaccard",
    tau: float = 0.5,
    max_replicas: int = 3,
) -> tuple[Tensor, Tensor]:
    """See `swarm_kv.ops.join_clusters`."""
    entries = unpack_bits(bits)
    medoids = unpack_bits(medoid_bits)
    rows, homes = [0], []
    for own in entries:
        near = []
        for cluster, other in enumerate(medoids):
            common = int((own & other).sum())
            of_all = {
                "jaccard": int((own | other).sum()),
                "conditional": min(int(own.sum()), int(other.sum())),
                "global": steps,
            }[distance]
            if common:
                near.append((1 - common / of_all, cluster))
        near.sort()
        joined = [cluster for d, cluster in near if d < tau][:max_replicas]
        homes += joined or [cluster for _, cluster in near[:1]]
        rows.append(len(homes))
    return torch.tensor(rows), torch.tensor(homes, dtype=torch.int64)


def gather_entries(pool: Tensor, slots: Tensor, entry_elements: int) -> Tensor:
    """See `swarm_kv.store_ops.gather_entries`."""
    return pool[slots[:, None] + torch.arange(entry_elements)]


HALF_LIMIT = torch.finfo(torch.float16).max
GROUP = 32
"""Numbers that share a scale with `kivi4`."""


def _levels(numbers: Tensor, step: Tensor, least: int, most: int) -> Tensor:
    """The nearest steps, as the low bits of bytes. Where there is no step, there is one level."""
    levels = (numbers / step.double()).where(step > 0, 0.0).round().clamp(least, most)
    return levels.to(torch.int8).view(torch.uint8)


def _halves(code: Tensor) -> Tensor:
    """The float16 numbers [..., n], as float64, that bytes [..., 2 n] are."""
    return code.clone(memory_format=torch.contiguous_format).view(torch.float16).double()


def encode_entries(k: Tensor, v: Tensor, codec: str) -> tuple[Tensor, Tensor]:
    """See `swarm_kv.store_ops.encode_entries`. Of levels that are equally near it takes either."""
    kv_heads, count, head_dim = k.shape
    # [n, 2, kv_heads, head_dim]
    numbers = torch.stack([k, v]).double().permute(2, 0, 1, 3).contiguous()
    if codec == "int8":
        channels = torch.empty(0, kv_heads, head_dim)
        scales = (numbers.abs().amax(-1, keepdim=True) / 127).half()
        levels = _levels(numbers, scales, -127, 127)
    else:
        mean, deviation = k.double().mean(1), k.double().std(1, correction=0)
        channels = torch.stack([mean, deviation]).float()
        keys = ((numbers[:, 0] - mean) / deviation).where(deviation > 0, 0.0)
        flat = torch.stack([keys, numbers[:, 1]], 1).flatten(2)
        groups = -(-flat.shape[2] // GROUP)
        last = flat[..., -1:].expand(-1, -1, groups * GROUP - flat.shape[2])
        grouped = torch.cat([flat, last], -1).view(count, 2, groups, GROUP)
        low = grouped.amin(-1, keepdim=True).half()
        above = grouped - low.double()
        step = (above.amax(-1, keepdim=True) / 15).half()
        first, second = _levels(above, step, 0, 15).chunk(2, -1)
        scales, levels = torch.cat([low, step], -1), first | second << 4
    return torch.cat([scales.view(torch.uint8), levels], -1).flatten(1), channels


def decode_entries(
    codes: Tensor,
    slots: Tensor,
    codec: str,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    channels: Tensor | None = None,
) -> Tensor:
    """See `swarm_kv.store_ops.decode_entries`."""
    count, half = len(slots), kv_heads * head_dim
    if codec == "int8":  # of each head's K, then of each head's V: a scale and the numbers
        size = 2 + head_dim
        code = gather_entries(codes, slots, 2 * kv_heads * size).view(count, 2 * kv_heads, size)
        numbers = _halves(code[..., :2]) * code[..., 2:].contiguous().view(torch.int8)
    else:  # of each group of K, then of V: its least number, a step, and the numbers
        assert channels is not None
        groups, size = -(-half // GROUP), 4 + GROUP // 2
        code = gather_entries(codes, slots, 2 * groups * size).view(count, 2, groups, size)
        low, step = _halves(code[..., :4]).chunk(2, -1)
        levels = torch.cat([code[..., 4:] & 15, code[..., 4:] >> 4], -1)
        mean, deviation = channels.double().view(2, half)
        keys, values = (low + step * levels).flatten(2)[..., :half].unbind(1)
        numbers = torch.stack([keys * deviation + mean, values], 1)
    if dtype == torch.float16:  # scales are rounded, maybe up
        numbers = numbers.clamp(-HALF_LIMIT, HALF_LIMIT)
    return numbers.flatten(1).to(dtype)


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
    """See `swarm_kv.ops.sparse_attention`. Differentiable, like all of PyTorch's operations."""
    rows, heads, dim = q.shape
    half = kv_heads * dim
    outs = [torch.zeros(0, heads, dim, dtype=torch.float64)]
    sums = [torch.zeros(0, heads, dtype=torch.float64)]
    for r in range(rows):
        own = slots[int(row_offsets[r]) : int(row_offsets[r + 1])]
        entries = pool.double()[own[:, None] + torch.arange(2 * half)]
        keys, values = entries.view(-1, 2, kv_heads, dim).permute(1, 2, 0, 3)
        scores = scale * torch.einsum("hd,hnd->hn", q[r].double(), _repeat_heads(keys, heads))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[:, None].nan_to_num(neginf=0.0)).exp()[:, : len(own)]
        outs.append(torch.einsum("hn,hnd->hd", weights, _repeat_heads(values, heads))[None])
        sums.append(lse[None])
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.cat(outs).to(dtype), torch.cat(sums).to(dtype)


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


RUN = 16
"""Entries in token order that go to one drive together."""
MAX_READ = 1 << 20
"""Bytes of one request."""
PLANNING = 2e-7
"""Seconds per entry that a last drive must be late by for its reads to move."""
EVEN = 1 / 32
"""Lateness, as a share of the mean, up to which drives count as even."""


def _place(sizes: list[int], members: list[int], speeds: list[float], name: str) -> list[int]:
    """Drive of each member position."""
    drives = len(speeds)
    parts = [max(1, math.floor(speed / max(speeds) * 2**20 + 0.5)) for speed in speeds]
    credit = [0] * drives
    result: list[int] = []
    turn = 0

    def furthest_behind(count: int) -> int:
        for d in range(drives):
            credit[d] += count * parts[d]
        chosen = max(range(drives), key=lambda d: (credit[d], -d))
        credit[chosen] -= count * sum(parts)
        return chosen

    def place_whole(count: int) -> None:
        nonlocal turn
        if name == "weighted":
            drive = furthest_behind(count)
        else:
            drive, turn = turn % drives, turn + 1
        result.extend([drive] * count)

    def place_runs(count: int) -> None:
        for first in range(0, count, RUN):
            place_whole(min(RUN, count - first))

    for size in sizes:
        own = members[len(result) : len(result) + size]
        if name == "sequential":
            place_whole(size)
        elif size > 2 and own == list(range(own[0], own[0] + size)):
            place_runs(size)
        elif name == "weighted":
            result.extend(furthest_behind(1) for _ in range(size))
        else:
            start = turn if name == "round_robin" else 0
            result.extend((start + j) % drives for j in range(size))
            turn += size if name == "round_robin" else 0
    place_runs(len(members) - len(result))
    return result


Reads = list[tuple[int, int]]
"""Of one drive: byte offset, and which wanted entry, ascending."""


def _even_out(
    chosen: list[int],
    copies: list[list[int]],
    places: list[tuple[int, int]],
    length: int,
    base: list[float],
    transfer: list[float],
) -> None:
    """See csrc/core/rebalance.h.

    Args:
        chosen: position read for each wanted entry; changed. copies: all positions of each.
        places: drive and byte offset of each position. length: bytes of an entry.
    """
    drives = len(base)
    queues: list[Reads] = [[] for _ in range(drives)]
    for index, position in enumerate(chosen):
        drive, offset = places[position]
        bisect.insort(queues[drive], (offset, index))

    def between(drive: int, first: int, second: int) -> float:
        return min(max(0, second - first - length) * transfer[drive], base[drive])

    def marginal(drive: int, offset: int, before: Reads, behind: Reads) -> float:
        """Seconds that reading at `offset` adds to what lies before and behind it."""
        alone = length * transfer[drive]
        if not before and not behind:
            return alone + base[drive]
        if before:
            alone += between(drive, before[-1][0], offset)
        if behind:
            alone += between(drive, offset, behind[0][0])
        if before and behind:
            alone -= between(drive, before[-1][0], behind[0][0])
        return alone

    seconds = [base[d] if queues[d] else 0.0 for d in range(drives)]
    for d, queue in enumerate(queues):
        for i, (offset, _) in enumerate(queue):
            seconds[d] += length * transfer[d] + (between(d, queue[i - 1][0], offset) if i else 0)

    def move(drive: int, i: int, worth: float) -> bool:
        queue = queues[drive]
        offset, index = queue[i]
        saved = marginal(drive, offset, queue[:i], queue[i + 1 :])
        if saved <= base[drive] * 1e-6:
            return False
        best, finish = None, seconds[drive]
        for position in copies[index]:
            other, place = places[position]
            at = bisect.bisect_right(queues[other], (place, len(chosen)))
            before, behind = queues[other][:at], queues[other][at:]
            added = marginal(other, place, before, behind)
            if before and before[-1][0] == place:  # the same bytes once more
                added = length * transfer[other] + base[other]
            if other != drive and added <= worth * saved and seconds[other] + added < finish:
                best, finish = (position, other, place, at, added), seconds[other] + added
        if best is None:
            return False
        position, other, place, at, added = best
        seconds[drive] -= saved
        del queue[i]
        seconds[other] += added
        queues[other].insert(at, (place, index))
        chosen[index] = position
        return True

    def relieve(drive: int, goal: float, worth: float) -> bool:
        moved, i = False, 0
        while i < len(queues[drive]) and seconds[drive] > goal:
            if move(drive, i, worth):
                moved = True
            else:
                i += 1
        i = len(queues[drive])
        while i > 0 and seconds[drive] > goal:
            i -= 1
            moved |= move(drive, i, worth)
        return moved

    if max(seconds) - sum(seconds) / drives <= PLANNING * len(chosen):
        return
    for worth in (1.0, 3.0, math.inf):
        more = True
        while more:
            mean = sum(seconds) / drives
            if max(seconds) - mean <= EVEN * mean:
                return
            more = relieve(seconds.index(max(seconds)), mean, worth)


def simulate_reads(
    offsets: Tensor,
    members: Tensor,
    entries: int,
    entry_bytes: int,
    t_base: Tensor,
    t_transfer: Tensor,
    block: int,
    placement: str,
    router: str,
    clusters: Tensor,
    cluster_rows: Tensor,
    wanted: Tensor,
    wanted_rows: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `swarm_kv.simulate.simulate_reads`."""
    bounds, held = offsets.tolist(), members.tolist()
    base, transfer = t_base.tolist(), t_transfer.tolist()
    steps, drives = len(cluster_rows) - 1, len(base)
    cost = [base[d] + entry_bytes * transfer[d] for d in range(drives)]
    sizes = offsets.diff().tolist()
    drive_of = _place(sizes, held, [1 / seconds for seconds in cost], placement)
    rank_of = [drive_of[:p].count(d) for p, d in enumerate(drive_of)]
    copies_of: list[list[int]] = [[] for _ in range(entries)]
    for position, entry in enumerate(held):
        copies_of[entry].append(position)

    requests = torch.zeros(steps, drives, dtype=torch.int64)
    sizes_read = torch.zeros(steps, drives, dtype=torch.int64)
    for t in range(steps):
        named: dict[int, set[int]] = {}  # per entry: the copies that were selected, -1: any
        for c in clusters[int(cluster_rows[t]) : int(cluster_rows[t + 1])].tolist():
            for position in range(bounds[c], bounds[c + 1]):
                named.setdefault(held[position], set()).add(position)
        for entry in wanted[int(wanted_rows[t]) : int(wanted_rows[t + 1])].tolist():
            named.setdefault(entry, set()).add(-1)
        candidates: list[list[int]] = []  # per entry to read, the selected copy first
        for entry in sorted(named):
            copies = sorted(named[entry] - {-1}) or copies_of[entry]
            selected = sorted(named[entry])
            for own in selected[:1] if router in ("swarm", "dedup_only") else selected:
                candidates.append(sorted(copies, key=lambda p: (p != own, p)))

        chosen = [copies[0] for copies in candidates]
        if router in ("swarm", "balance_only"):
            holders = [copies_of[held[p]] for p in chosen]
            places = [(drive_of[p], rank_of[p] * entry_bytes) for p in range(len(held))]
            _even_out(chosen, holders, places, entry_bytes, base, transfer)

        reads = collections.Counter(chosen)
        for d, again in itertools.product(range(drives), range(max(reads.values(), default=0))):
            begin = end = -1
            ranks = (rank_of[p] for p, n in reads.items() if drive_of[p] == d and n > again)
            for rank in sorted(ranks):
                first = rank * entry_bytes // block * block
                last = -(-(rank + 1) * entry_bytes // block) * block
                gap = max(0, first - end)
                joins = begin >= 0 and gap * transfer[d] <= base[d]
                if not joins or max(last, end) - begin > max(MAX_READ, entry_bytes):
                    requests[t, d] += 1
                    begin = end = first
                sizes_read[t, d] += max(last, end) - end
                end = max(last, end)
    seconds = (requests * t_base + sizes_read * t_transfer).amax(1)
    return requests, sizes_read, seconds
