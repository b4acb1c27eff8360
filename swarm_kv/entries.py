"""Entries of one layer: their shape, and how they come out of the pool and off the drives."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import torch

from .store import NOTHING, Segment, Store, Wanted
from .store_ops import gather_entries


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Shape of an entry and of what asks for it: fixed for a layer."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float

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


def read_entries(
    store: Store,
    shape: Geometry,
    segments: tuple[Segment, ...],
    first: int,
    last: int,
    between: Callable[[], object] = lambda: None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [kv_heads, last - first, head_dim] of some entries; leaves the cache alone.

    Args:
        store, shape, segments: where they lie, and their form.
        first, last: numbers through `segments`.
        between: called after each piece that was read.
    """
    keys = torch.empty(shape.kv_heads, last - first, shape.head_dim, dtype=shape.dtype)
    values = torch.empty_like(keys)
    wanted = Wanted(segments, NOTHING, torch.arange(first, last, dtype=torch.int64), last)
    with store.fetch([wanted], purpose="stream") as fetch:
        for ((ids, slots),) in itertools.chain([fetch.resident], fetch.rounds()):
            keys[:, ids - first], values[:, ids - first] = gather(store, shape, slots)
            between()
    return keys, values
