"""Fits the codes of stored keys anew, to the keys and queries of today.

Codes that were fitted to a prefill lose what comes later: on SmolLM2, 2,048 tokens after 5,632, a
selection by them had 0.59 to 0.78 of the attention that it could have, with new ones 0.74 to 0.98.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from .background import Check
from .codes import TRAINING_KEYS, Codebook, retrain, train
from .entries import Geometry, stream_entries
from .layout import Queries
from .rewrite import LEAST_QUERIES
from .store import IndexCharge, Segment, Store

GROWTH = 32
"""Codes are fitted anew when 1/32 of the keys came later; that reads 32 entries per token."""
LEAST = 256
"""Keys that must have come later, however few there were."""


def due(entries: int, trained_on: int) -> bool:
    """Whether codes that were fitted to `trained_on` keys should be fitted to `entries`."""
    return entries >= trained_on + max(LEAST, trained_on // GROWTH)


@dataclasses.dataclass(frozen=True)
class Task:
    """What is to be done; holds no sequence, so that one that ends can go.

    Attributes:
        store, shape, segments: where the keys lie.
        entries: how many.
        codebook: of today.
        coming: [kv_heads, n, head_dim], keys of the window: rotation by position puts new keys
            where no old one is, so that codes must be fitted ahead.
        queries: see `rewrite.Task`; with too few, directions count as they did.
    """

    store: Store
    shape: Geometry
    segments: tuple[Segment, ...]
    entries: int
    codebook: Codebook
    coming: torch.Tensor
    queries: Queries | None


def recode(task: Task, check: Check) -> tuple[Codebook, torch.Tensor]:
    """A new codebook and the codes [kv_heads, bytes, entries]; nothing is written.

    Keys are read in pieces: what is held is a sample of them.

    Raises:
        CapacityError: `dram_bytes` has no room for the sample.
        ArgumentError: a key or query is no number that can be fitted to.
        StorageError: an entry could not be read.
    """
    entries, shape = task.entries, task.shape
    sampled = torch.arange(0, entries, -(-entries // TRAINING_KEYS))
    working = IndexCharge(task.store, len(sampled) * shape.entry_bytes // 2)
    try:
        sample = torch.empty(shape.kv_heads, len(sampled), shape.head_dim, dtype=shape.dtype)
        for numbers, keys in _keys(task, sampled, check):
            sample[:, torch.searchsorted(sampled, numbers)] = keys
        codebook = _fitted(task, torch.cat([sample, task.coming], dim=1))
    finally:
        working.release()
    codebook = dataclasses.replace(codebook, trained_on=entries)
    everything = torch.arange(entries)
    codes: torch.Tensor | None = None
    for numbers, keys in _keys(task, everything, check):
        piece = codebook.encode(keys)
        if codes is None:
            codes = piece.new_empty(*piece.shape[:2], entries)
        codes[:, :, numbers] = piece
    assert codes is not None
    return codebook, codes


def _fitted(task: Task, sample: torch.Tensor) -> Codebook:
    if task.queries is None or len(task.queries) < LEAST_QUERIES:
        return retrain(task.codebook, sample)
    parts, bits = task.codebook.centroids.shape[1], task.codebook.bits
    return train(sample, parts * bits // 8, task.queries.q, bits)


def _keys(
    task: Task, numbers: torch.Tensor, check: Check
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for ids, keys, _ in stream_entries(task.store, task.shape, task.segments, numbers):
        check()
        yield ids, keys
