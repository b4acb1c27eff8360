"""What a layout's reads would cost, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _library  # noqa: F401  (loads the operators)
from .errors import typed_errors

__all__ = ["simulate_cache", "simulate_reads"]


@typed_errors
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
    """Requests, bytes and seconds of T steps on D drives, by the code of a real fetch.

    Each step is deduplicated, balanced over the drives (Eq. 7, section 6.1) and coalesced like a
    fetch from a first segment with these clusters, an empty cluster cache and ample staging memory.

    Args:
        offsets, members: int32, cluster c holds `members[offsets[c]:offsets[c + 1]]`; members
            behind the last cluster are loose.
        entries: how many there are. entry_bytes: size of one.
        t_base, t_transfer: [D] float64, seconds per request and per byte of each drive, positive.
        block: bytes whose multiples requests begin and end on; a power of two.
        placement, router: strategies by name, as `SwarmConfig` takes them.
        clusters, cluster_rows: int64; step t reads the clusters
            `clusters[cluster_rows[t]:cluster_rows[t + 1]]` whole.
        wanted, wanted_rows: int64; single entries of each step, in the same form.

    Returns:
        requests [T, D] int64, bytes [T, D] int64 (gaps and block rounding included), and seconds
        [T] float64: the slowest drive's, by its device model.

    Raises:
        ArgumentError: a shape, dtype or value is wrong, an entry is in no cluster and not loose, or
            a step asks for what does not exist.
    """
    requests, size, seconds = torch.ops.swarm_kv.simulate_reads(
        offsets,
        members,
        entries,
        entry_bytes,
        t_base,
        t_transfer,
        block,
        placement,
        router,
        clusters,
        cluster_rows,
        wanted,
        wanted_rows,
    )
    return requests, size, seconds


@typed_errors
def simulate_cache(
    offsets: Tensor,
    members: Tensor,
    entries: int,
    entry_bytes: int,
    t_base: Tensor,
    t_transfer: Tensor,
    placement: str,
    policy: str,
    capacity: int,
    initial_fill: str,
    activations: Tensor,
    profile_queries: int,
    wanted: Tensor,
    wanted_rows: Tensor,
) -> Tensor:
    """Which of the entries wanted by T steps a cluster cache would have served.

    The cache is the store's own, with one segment: a step activates its entries, those in memory
    are served, and the others are read and offered to the cache.

    Args:
        offsets, members, entries, entry_bytes, t_base, t_transfer, placement: see `simulate_reads`.
        policy: `cache_policy` as `SwarmConfig` takes it. capacity: entries that fit.
        initial_fill: what the cache begins with, as `SwarmConfig` takes it.
        activations: int32 [entries], how many of the profile's queries activated each entry; empty
            where `initial_fill` is `none`. profile_queries: length of the profile.
        wanted, wanted_rows: int64; step t wants `wanted[wanted_rows[t]:wanted_rows[t + 1]]`, each
            entry once.

    Returns:
        bool, like `wanted`: whether the entry was in memory when its step began.

    Raises:
        ArgumentError: a shape, dtype or value is wrong, or a name unknown.
    """
    hits: Tensor = torch.ops.swarm_kv.simulate_cache(
        offsets,
        members,
        entries,
        entry_bytes,
        t_base,
        t_transfer,
        placement,
        policy,
        capacity,
        initial_fill,
        activations,
        profile_queries,
        wanted,
        wanted_rows,
    )
    return hits


@torch.library.register_fake("swarm_kv::simulate_cache")
def _(
    offsets: Tensor,
    members: Tensor,
    entries: int,
    entry_bytes: int,
    t_base: Tensor,
    t_transfer: Tensor,
    placement: str,
    policy: str,
    capacity: int,
    initial_fill: str,
    activations: Tensor,
    profile_queries: int,
    wanted: Tensor,
    wanted_rows: Tensor,
) -> Tensor:
    return torch.empty_like(wanted, dtype=torch.bool)


def simulate_selections(
    offsets: Tensor,
    members: Tensor,
    selections: Sequence[tuple[Tensor, Tensor]],
    *,
    entries: int,
    entry_bytes: int,
    drives: Sequence[tuple[float, float]],
    block: int = 512,
    placement: str = "round_robin",
    router: str = "swarm",
) -> tuple[Tensor, Tensor, Tensor]:
    """`simulate_reads` of what a selector returned, step by step.

    Args:
        offsets, members, entries, entry_bytes, block, placement, router: see `simulate_reads`.
        selections: clusters and single entries of each step, both int64.
        drives: seconds per request and per byte of each.
    """
    t_base, t_transfer = torch.tensor(drives, dtype=torch.float64).unbind(1)
    lists = []
    for rows in zip(*selections, strict=True):
        sizes = torch.tensor([0, *(row.numel() for row in rows)])
        lists += [torch.cat(rows), sizes.cumsum(0)]
    return simulate_reads(
        offsets,
        members,
        entries,
        entry_bytes,
        t_base.contiguous(),
        t_transfer.contiguous(),
        block,
        placement,
        router,
        *lists,
    )


@torch.library.register_fake("swarm_kv::simulate_reads")
def _(
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
    steps, drives = cluster_rows.shape[0] - 1, t_base.shape[0]
    torch._check(
        wanted_rows.shape[0] == steps + 1,
        lambda: f"simulate_reads: {steps} steps of clusters, {wanted_rows.shape[0] - 1} of entries",
    )
    requests = torch.empty(steps, drives, dtype=torch.int64)
    return requests, torch.empty_like(requests), torch.empty(steps, dtype=torch.float64)
