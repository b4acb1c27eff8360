"""Writes stored segments anew as one, grouped by what recent queries activate together.

Tails do not pile up because they are merged, and a context that has drifted gets clusters of today:
both read some neighbouring segments back and write one in their place. Entries keep their numbers,
so codes and means stay as they are; only where entries lie changes.
"""

from __future__ import annotations

import contextlib
import dataclasses

import torch

from .background import Check
from .entries import Geometry, read_entries
from .errors import ArgumentError
from .index import Index, concatenated
from .layout import Layout, Problem, Queries, choose
from .selectors import Selector
from .store import IndexCharge, Segment, Store
from .store_ops import stored_entry_bytes
from .summary import Clustered, Summary

LEAST_QUERIES = 16
"""Fewer queries say nothing about what belongs together."""
MERGED = 512
"""Entries of tails that are worth merging. Longer waits cost reads, shorter ones writes."""


def due(sizes: list[int]) -> int | None:
    """First of the newest segments that should be one, or None.

    Segments are merged when they are as large as the one before them, all newer ones together, so
    that there are about log2(entries / MERGED) of them and an entry is written as often.

    Args:
        sizes: entries per segment, oldest first. The first one is never merged: its clusters were
            made of the whole prefill.
    """
    first, total = len(sizes), 0
    while first > 1 and sizes[first - 1] <= max(total, MERGED - 1):
        first -= 1
        total += sizes[first]
    return first if total >= MERGED and len(sizes) - first > 1 else None


@dataclasses.dataclass(frozen=True)
class Task:
    """What is to be written anew; holds no sequence, so that one that ends can go.

    Attributes:
        store, shape, label, selector: of the sequence.
        segments: neighbours, oldest first.
        first: number of segments before them.
        index: of these entries alone, in the layout that they have.
        owner: int64 [clusters of `index`], see `Index.owner`; counted from their first cluster, and
            -1 - c for cluster c of those before.
        queries: [heads, n, head_dim], scaled, later than all these entries; None: none known.
        probes: see `layout.Problem`.
    """

    store: Store
    shape: Geometry
    label: str
    selector: Selector
    segments: tuple[Segment, ...]
    first: int
    index: Index
    owner: torch.Tensor
    queries: Queries | None
    probes: torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """The outcome: `segment` takes the place of the segments of `task`.

    Attributes:
        task: what was asked.
        segment: on the drives, complete.
        owner: int64 [clusters], counted like `Task.owner`.
        summary: of its clusters, where the selector has one.
    """

    task: Task
    segment: Segment
    owner: torch.Tensor
    summary: Summary | None


def rewrite(task: Task, check: Check) -> Rewritten:
    """Read, group, write. The old segments stay as they are, whatever happens.

    Raises:
        CapacityError: `dram_bytes` has no room for these entries and their index.
        StorageError: an entry could not be read, or a drive failed or is full.
    """
    store, shape, entries = task.store, task.shape, task.index.entries
    working = IndexCharge(store, entries * shape.entry_bytes)
    try:
        keys, values = read_entries(store, shape, task.segments, 0, entries, check)
        layout, owner = _group(task, keys)
        check()
        summary = _summary(task, keys, layout)
        config = store.config
        segment = store.write(
            keys,
            values,
            layout.offsets,
            layout.members,
            task.label,
            layout.activations,
            config.initial_fill,
            layout.queries,
            config.codec,
        )
    finally:
        working.release()
    return Rewritten(task, segment, owner, summary)


def _group(task: Task, keys: torch.Tensor) -> tuple[Layout, torch.Tensor]:
    if task.queries is not None and len(task.queries) >= LEAST_QUERIES:
        # Not where clusters would take more copies than they may, or queries are no numbers.
        with contextlib.suppress(ArgumentError):
            layout = _by_queries(task, keys, task.queries)
            return layout, torch.arange(layout.offsets.numel() - 1)
    offsets, members, owner = by_owner(task.index.offsets, task.index.members, task.owner)
    return Layout("merged", offsets, members), owner


def _by_queries(task: Task, keys: torch.Tensor, queries: Queries) -> Layout:
    config, index = task.store.config, task.index
    share = len(queries) / config.profile_queries
    few = dataclasses.replace(config, min_activation=max(1, round(config.min_activation * share)))

    def indexed(layout: Layout) -> Index:
        return index.laid_out(layout.offsets, layout.members, _summary(task, keys, layout))

    return choose(
        Problem(
            keys=keys,
            sinks=0,
            entries=index.entries,
            queries=queries,
            scale=1.0,
            stored_bytes=stored_entry_bytes(keys, config.codec),
            index=indexed,
            selector=task.selector,
            probes=task.probes,
        ),
        few,
    )


def _summary(task: Task, keys: torch.Tensor, layout: Layout) -> Summary | None:
    summary = task.index.summary
    if summary is None:
        return None
    queries = None if task.queries is None else task.queries.q
    return summary.alike(
        Clustered(keys, layout.offsets, layout.members, layout.activations, queries)
    )


def by_owner(
    offsets: torch.Tensor, members: torch.Tensor, owner: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same clusters with the parts of each joined, in the order of their owners.

    Args:
        offsets, members: int32; entries in no cluster stay behind the clusters.
        owner: int64 [clusters], see `Task.owner`.

    Returns:
        offsets, members, and the owners of the new clusters, in the new numbering.
    """
    joined: dict[int, dict[int, None]] = {}
    bounds, flat = offsets.tolist(), members.tolist()
    owners = owner.tolist()
    for cluster, home in enumerate(owners):
        # Two parts may hold copies of one entry; a cluster holds it once.
        joined.setdefault(home, {}).update(
            dict.fromkeys(flat[bounds[cluster] : bounds[cluster + 1]])
        )
    order = sorted(joined, key=lambda home: (home >= 0, abs(home)))
    lengths = torch.tensor([0, *(len(joined[home]) for home in order)])
    lists = [entry for home in order for entry in joined[home]] + flat[bounds[-1] :]
    new_owner = [home if home < 0 else number for number, home in enumerate(order)]
    return (
        lengths.cumsum(0).int(),
        torch.tensor(lists, dtype=torch.int32),
        torch.tensor(new_owner, dtype=torch.int64),
    )


def spliced(index: Index, done: Rewritten, segments: tuple[Segment, ...]) -> Index:
    """`index` with the clusters of `done` in the place of those that it was made from.

    Args:
        index: of all stored entries, newer ones than those of `done` included.
        done: what was written.
        segments: all of them now.
    """
    store, task = done.task.store, done.task
    lists = [store.clusters(segment) for segment in segments]
    offsets, members = concatenated(lists, [segment.entries for segment in segments])
    first = sum(segment.clusters for segment in segments[: task.first])
    last = first + sum(segment.clusters for segment in task.segments)
    count = done.segment.clusters
    own = torch.where(done.owner < 0, -1 - done.owner, done.owner + first)
    later = index.owner[last:].long()
    kept = torch.arange(first + count, first + count + len(later))
    moved = torch.where(later >= last, later + (count - (last - first)), later)
    moved = torch.where((later >= first) & (later < last), kept, moved)
    summary = index.summary
    if summary is not None and done.summary is not None:
        summary = summary.replaced(first, last, done.summary)
    owner = torch.cat([index.owner[:first].long(), own, moved])
    return dataclasses.replace(
        index, offsets=offsets, members=members, summary=summary, owner=owner.int()
    )
