"""Decoding steps of one recorded layer against drives, by the package's own path.

A `Sequence` ingests the context (profile, clusters, layout, writes, all as `SwarmConfig` says);
each step then selects with a recorded query and fetches what it selected through store, scheduler
and cluster cache. What a strategy selects, how it lies and what it costs come from one run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.drives import Drives
from swarm_kv import SwarmConfig, selectors
from swarm_kv.index import members_of
from swarm_kv.sequence import Geometry
from swarm_kv.sequence import Sequence as Row
from swarm_kv.store import Store, Wanted
from swarm_kv.trace import LayerTrace

OPENING = 10
"""Times faster are the drives while a store measures them. What it plans by is how they compare,
not how slow all are."""
STAGING = 128 << 20


@dataclasses.dataclass(frozen=True)
class Step:
    """One decoding step of one layer, all rows of the batch together.

    Attributes:
        seconds: from the call of fetch until the last entry was delivered.
        selecting: seconds that selecting took, before.
        bytes, requests: read from the drives.
        recall: attention mass on stored entries that the selection has, mean over rows; nan where
            it was not asked for.
        selected: entries.
    """

    seconds: float
    selecting: float
    bytes: float
    requests: float
    recall: float
    selected: float


@dataclasses.dataclass(frozen=True)
class Cost:
    """Means over steps."""

    seconds: float
    selecting: float
    bytes: float
    requests: float
    recall: float
    selected: float

    @property
    def bytes_per_second(self) -> float:
        """Delivered by the drives while entries were fetched."""
        return self.bytes / self.seconds


def mean(steps: Sequence[Step]) -> Cost:
    return Cost(
        *(
            statistics.mean(getattr(step, field.name) for step in steps)
            for field in dataclasses.fields(Cost)
        )
    )


class Decoder:
    """`batch` sequences of one layer in a store of their own.

    Args:
        store: with room for all of it.
        layer: recorded; its test queries are the steps.
        batch: sequences with the same tokens that share nothing on the drives.
    """

    def __init__(self, store: Store, layer: LayerTrace, batch: int = 1) -> None:
        self.store, self.config, self.layer = store, store.config, layer
        shape = Geometry(
            layer.q.shape[0], layer.k.shape[0], layer.k.shape[2], layer.k.dtype, layer.scale
        )
        selector = selectors.resolve(self.config.selector)
        self.rows = [
            Row(store, shape, f"layer {layer.layer}, row {number}", selector)
            for number in range(batch)
        ]
        context = layer.settings.context + self.config.window
        for row in self.rows:
            row.ingest(layer.k[:, :context], layer.v[:, :context], layer.q[:, :context])
            row.prepare()
        self._charged = 0

    @property
    def entries(self) -> int:
        """Stored entries of a row."""
        return self.rows[0].limit

    def limit_cache(self, share: float) -> None:
        """Let the cluster cache hold `share` of the stored entries, and no more."""
        self.store.charge(-self._charged)
        counters = self.store.counters()
        dram = counters["dram"]
        cached = int(share * self.entries * len(self.rows)) * counters["cached_entry_bytes"]
        held = dram["used"] - dram["cache"]
        self._charged = dram["limit"] - held - cached
        self.store.charge(self._charged)

    def steps(self, count: int, *, first: int = 0, judged: bool = True) -> list[Step]:
        """Decode test queries `first` to `first + count`; rows take queries one after another."""
        tokens = self.layer.positions
        return [
            self._step(
                [
                    int(tokens[(first + number * len(self.rows) + row) % len(tokens)])
                    for row in range(len(self.rows))
                ],
                judged,
            )
            for number in range(count)
        ]

    def _step(self, tokens: Sequence[int], judged: bool) -> Step:
        began = time.perf_counter()
        chosen = [self._select(row, token) for row, token in zip(self.rows, tokens, strict=True)]
        selecting = time.perf_counter() - began
        before = _read(self.store)
        wanted = [
            Wanted(_segments(row), clusters, entries, row.limit)
            for row, (clusters, entries) in zip(self.rows, chosen, strict=True)
        ]
        began = time.perf_counter()
        with self.store.fetch(wanted) as fetch:
            for _ in fetch.rounds():
                pass
            seconds = time.perf_counter() - began
        read = [after - old for after, old in zip(_read(self.store), before, strict=True)]
        recall, selected = [], []
        for row, token, (clusters, entries) in zip(self.rows, tokens, chosen, strict=True):
            index = row.index()
            assert index is not None
            members = members_of(index.offsets, index.members, clusters, entries)
            selected.append(len(members))
            if judged:
                attention = self._attention(token)
                recall.append(float(attention[members].sum() / attention.sum()))
        return Step(
            seconds,
            selecting,
            read[1],
            read[0],
            statistics.mean(recall) if recall else float("nan"),
            statistics.mean(selected),
        )

    def _select(self, row: Row, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        index = row.index()
        assert index is not None
        query = self.layer.at(torch.tensor([token])).float() * self.layer.scale
        budget = max(1, round(self.config.sparsity * len(row)))
        return row.selector(query, index, budget, self.config)

    def _attention(self, token: int) -> torch.Tensor:
        """float32 [stored entries]: what a test query gives to each, mean over heads."""
        layer = self.layer
        query = layer.at(torch.tensor([token]))[:, 0].float() * layer.scale
        rows = query.view(layer.k.shape[0], -1, query.shape[1])
        scores = rows @ layer.k[:, : token + 1].float().mT
        first = len(self.rows[0].sinks)
        return scores.softmax(-1).mean((0, 1))[first : first + self.entries]


def _segments(row: Row) -> tuple[Any, ...]:
    assert row.stored is not None
    return row.stored.segments


def _read(store: Store) -> tuple[int, int]:
    drives = store.counters()["drives"]
    return sum(d["reads"] for d in drives), sum(d["read_bytes"] for d in drives)


@contextlib.contextmanager
def decoding(
    layer: LayerTrace, drives: Drives, *, batch: int = 1, cache: float = 0.0, **settings: Any
) -> Iterator[Decoder]:
    """A `Decoder` on stand-in drives, which write without limits and read by their models.

    Args:
        layer, batch: see `Decoder`.
        drives: where it stores.
        cache: see `Decoder.limit_cache`.
        settings: of `SwarmConfig`.
    """
    context = layer.settings.context
    entry = 2 * layer.k.shape[0] * layer.k.shape[2] * layer.k.element_size()
    room = batch * context * (3 * entry + 512)  # everything cached, and its index
    defaults = {"staging_bytes": STAGING, "dram_bytes": 2 * STAGING + room, "recall_every": 0}
    config = SwarmConfig(**{"paths": drives.paths, "recluster": "off", **defaults, **settings})
    with drives.following([model.slower(1 / OPENING) for model in drives.models]):
        store = Store(config)
    try:
        with drives.unthrottled():
            decoder = Decoder(store, layer, batch)
        decoder.limit_cache(cache)
        yield decoder
        decoder.rows.clear()
    finally:
        store.close()
