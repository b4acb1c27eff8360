"""Entries of one layer: their shape, and how they come out of the pool and off the drives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from .index import concatenated
from .store import NOTHING, Segment, Store, Wanted
from .store_ops import gather_entries

PIECE = 2048
"""Entries that a stream asks for at once."""


class Geometry(NamedTuple):
    """Shape of an entry and of what asks for it: fixed for a layer."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float

    def difference(self, other: Geometry) -> str:
        """What `other` has otherwise, in words, such as "kv_heads 2 before, 4 now"."""
        pairs = zip(self._fields, self, other, strict=True)
        return "; ".join(
            f"{name} {mine} before, {its} now" for name, mine, its in pairs if mine != its
        )

    def stored(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values in the dtype of what is stored."""
        return q.to(self.dtype), k.to(self.dtype), v.to(self.dtype)

    @property
    def entry_elements(self) -> int:
        """Numbers per entry: K and V of all KV heads."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def entry_bytes(self) -> int:
        """Bytes per entry."""
        return self.entry_elements * self.dtype.itemsize


def gather(store: Store, shape: Geometry, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [kv_heads, n, head_dim] of slots, copied out of the pool."""
    rows = gather_entries(
        store.pool(shape.dtype), slots // shape.dtype.itemsize, shape.entry_elements
    ).view(-1, 2, shape.kv_heads, shape.head_dim)
    return rows[:, 0].transpose(0, 1), rows[:, 1].transpose(0, 1)


def stream_entries(
    store: Store, shape: Geometry, segments: tuple[Segment, ...], wanted: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Numbers, keys and values of entries, piece by piece, in the order in which they lie.

    Leaves the cluster cache alone. What it holds of a piece cannot make room meanwhile, which is
    why pieces are short.

    Args:
        store, shape, segments: where they lie, and their form.
        wanted: int64, numbers through `segments`.
    """
    if wanted.numel() == 0:
        return
    total = sum(segment.entries for segment in segments)
    lists = [store.clusters(segment) for segment in segments]
    members = concatenated(lists, [segment.entries for segment in segments])[1].long()
    place = torch.empty(total, dtype=torch.int64)
    place[members.flip(0)] = torch.arange(len(members)).flip(0)
    for piece in torch.split(wanted[place[wanted].argsort()], PIECE):
        with store.fetch([Wanted(segments, NOTHING, piece, total)], purpose="stream") as fetch:
            for ((ids, slots),) in itertools.chain([fetch.resident], fetch.rounds()):
                if ids.numel():
                    yield ids, *gather(store, shape, slots)


def read_entries(
    store: Store,
    shape: Geometry,
    segments: tuple[Segment, ...],
    first: int,
    last: int,
    between: Callable[[], object] = lambda: None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [kv_heads, last - first, head_dim] of some entries, see `stream_entries`.

    Args:
        store, shape, segments: where they lie, and their form.
        first, last: numbers through `segments`.
        between: called after each piece that was read.
    """
    keys = torch.empty(shape.kv_heads, last - first, shape.head_dim, dtype=shape.dtype)
    values = torch.empty_like(keys)
    for ids, k, v in stream_entries(store, shape, segments, torch.arange(first, last)):
        keys[:, ids - first], values[:, ids - first] = k, v
        between()
    return keys, values
