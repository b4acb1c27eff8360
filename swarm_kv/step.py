"""One decoding step in one layer, for all sequences of a batch at once.

    prepare -> append -> select -> fetch_attend -> observe -> settle

where `fetch_attend` is one operator: submit, attend to what is in memory, complete, attend, merge.

What a sequence gets does not depend on which others are in the batch: each has its own selection
and its own lists of entries; only reads and calls of operators are shared.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from . import ops, recall
from .index import members_of
from .selectors import Selector
from .sequence import Sequence
from .store import NOTHING, Asking, Store, Wanted

Attended = tuple[torch.Tensor, torch.Tensor]
"""out [rows, heads, head_dim] and lse [rows, heads]."""


class Part(NamedTuple):
    """What one sequence brings to a step.

    Attributes:
        row: the sequence.
        query: [heads, n, head_dim], rotated, not scaled; n >= 1. On the host, as `key`.
        asking: the same where attention runs; the same tensor where that is the host.
        key, value: [kv_heads, n, head_dim]: the queries' own tokens.
        visible: bool [entries, new ones included], what the mask shows; None for all.
    """

    row: Sequence
    query: torch.Tensor
    asking: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    visible: torch.Tensor | None

    @property
    def on_device(self) -> bool:
        """Whether attention runs on the store's device."""
        return self.asking is not self.query


class Ahead:
    """Reads that were started for predicted queries, until a step rides on them.

    Args:
        store: where the entries of all rows lie.
        rows: the sequences.
        queries: [rows, heads, n, head_dim], predicted, rotated and not scaled, on the CPU.
        selector: chooses.
        share: of the budget that is read ahead.
        began: when predicting began, by `time.perf_counter`.

    Attributes:
        share: as given.
        seconds: time that predicting, selecting and submitting took.
        released: whether it is of no use any more.
    """

    def __init__(
        self,
        store: Store,
        rows: list[Sequence],
        queries: torch.Tensor,
        selector: Selector,
        share: float,
        began: float,
    ) -> None:
        self._wanted = {
            row: select(row, query * row.geometry.scale, selector, share)
            for row, query in zip(rows, queries, strict=True)
        }
        self.fetch = store.fetch(self._wanted.values(), purpose="prefetch")
        self.share = share
        self.released = False
        self.seconds = time.perf_counter() - began

    def caught(self, row: Sequence, ids: torch.Tensor) -> tuple[int, int]:
        """How many of the stored entries `ids`, which are truly wanted, were predicted; of all."""
        assert row.stored is not None
        wanted, index = self._wanted[row], row.stored.index
        entries = wanted.entries
        if wanted.clusters.numel():
            entries = members_of(index.offsets, index.members, wanted.clusters, entries)
        predicted = torch.zeros(index.entries, dtype=torch.bool)
        predicted[entries[entries < index.entries]] = True
        return int(predicted[ids].sum()), ids.numel()

    def release(self) -> None:
        """End the reads that no step took over, and give their memory back."""
        self.released = True
        self.fetch.release()


class Cost(NamedTuple):
    """Time that the reads of a step cost decoding.

    Attributes:
        share: of the step's budget that was started ahead; 0 for none.
        predicting: predicting, selecting and submitting for that.
        submitting, waiting: in the step itself.
    """

    share: float
    predicting: float
    submitting: float
    waiting: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.predicting + self.submitting + self.waiting


def select(row: Sequence, query: torch.Tensor, selector: Selector, share: float = 1.0) -> Wanted:
    """What a step reads for scaled queries [heads, n, head_dim], true or predicted.

    Args:
        row: the sequence.
        query: asks.
        selector: chooses.
        share: of the budget, above 1 to make up for what a prediction misses.
    """
    index = row.index()
    if index is None:
        return Wanted((), NOTHING, NOTHING, 0)
    assert row.stored is not None
    if row.store.scorer is not None:
        index = dataclasses.replace(index, scorer=row.store.scorer.score)
    if row.config.sparsity == 1.0:
        chosen = NOTHING, torch.arange(row.limit, dtype=torch.int64)
    else:
        chosen = selector(query, index, round(share * budget_of(row)), row.config)
    return Wanted(row.stored.segments, *chosen, row.limit)


def budget_of(row: Sequence) -> int:
    """Stored entries that a step reads."""
    return max(1, round(row.config.sparsity * len(row)))


def _joined(queries: list[torch.Tensor]) -> torch.Tensor:
    """Queries [heads, n, head_dim] of all sequences as [rows, heads, head_dim]."""
    rows = [query.transpose(0, 1) for query in queries]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


class Step:
    """A decoding step under way.

    Args:
        store: where the entries of all rows lie.
        parts: one per sequence that has new tokens; of one geometry.
        softcap: see `ops.sparse_attention`.
        sinks: [heads], gpt-oss's logits without a value, or None, where attention runs.
    """

    def __init__(
        self,
        store: Store,
        parts: list[Part],
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> None:
        self.store = store
        self.parts = parts
        self.softcap = softcap
        shape = parts[0].row.geometry
        self.shape = shape
        self.scaled = [part.query * shape.scale for part in parts]
        self.queries = _joined([part.asking for part in parts])
        self.sinks = None if sinks is None else sinks.to(self.queries.dtype)
        ends = itertools.accumulate(part.query.shape[1] for part in parts)
        self.rows = [  # of `queries`, by part
            slice(end - part.query.shape[1], end) for end, part in zip(ends, parts, strict=True)
        ]
        self.fetched = [NOTHING for _ in parts]
        self.waited = 0.0
        self.cost: Cost | None = None  # when something was read

    def run(
        self, selector: Selector, ahead: Ahead | None, layer: int, number: int
    ) -> list[torch.Tensor]:
        """Attend with the new tokens in place, and store them.

        Args:
            selector: chooses what is read.
            ahead: reads for the same rows that were started ahead.
            layer, number: of this step, for the meters.

        Returns:
            Per part, out [n, heads, head_dim] in the accumulation dtype, where attention runs.
        """
        for part in self.parts:
            part.row.prepare()
            part.row.append(part.key, part.value)
        wanted = [
            select(part.row, query, selector)
            for part, query in zip(self.parts, self.scaled, strict=True)
        ]
        attended = self._read_and_attend(wanted, ahead)
        self._observe(ahead)
        if recall.due(number, layer, self.store.config.recall_every):
            self._measure(attended[1].cpu(), layer, 1024 * number + layer)
        attended = self._estimated(attended)
        for part in self.parts:
            part.row.settle()
        return [attended[0][rows] for rows in self.rows]

    def _read_and_attend(self, wanted: list[Wanted], ahead: Ahead | None) -> Attended:
        reads = any(one.segments for one in wanted)
        if not reads and not self.parts[0].on_device:
            return self._attend_resident()
        asking = Asking(
            self.queries,
            [part.query.shape[1] for part in self.parts],
            [self._own(part) for part in self.parts],
            self.shape.kv_heads,
            self.shape.scale,
            self.sinks,
            self.softcap,
            self._visible(wanted),
        )
        got = self.store.fetch_attend(wanted, asking, None if ahead is None else ahead.fetch)
        if reads:
            self.fetched, self.waited = got.ids, got.waiting
            share, predicting = (0.0, 0.0) if ahead is None else (ahead.share, ahead.seconds)
            self.cost = Cost(share, predicting, got.submitting, got.waiting)
        return got.out, got.lse

    def _own(self, part: Part) -> list[torch.Tensor]:
        """Slots of sinks and window, the queries' own tokens last."""
        if part.visible is None:
            return [part.row.sinks.slots, part.row.window.slots]
        return [part.row.resident(part.visible)]

    def _visible(self, wanted: list[Wanted]) -> torch.Tensor | None:
        """Which stored entries the masks show, see `Asking`."""
        if all(part.visible is None for part in self.parts):
            return None
        return torch.cat(
            [
                torch.ones(one.limit, dtype=torch.bool)
                if part.visible is None
                else part.row.stored_part(part.visible)
                for one, part in zip(wanted, self.parts, strict=True)
            ]
        )

    def _attend_resident(self) -> Attended:
        """Attention to sinks and window alone, of each query up to its own token; on the host."""
        lists = []
        for part in self.parts:
            slots = torch.cat(self._own(part))
            count, whole = part.query.shape[1], slots.numel()
            lists += [slots[: whole - (count - 1 - i)] for i in range(count)]
        sizes = itertools.accumulate(len(slots) for slots in lists)
        return ops.sparse_attention(
            _joined([part.query for part in self.parts]),
            self.store.pool(self.shape.dtype),
            torch.cat(lists) // self.shape.dtype.itemsize,
            torch.tensor([0, *sizes]),
            self.shape.kv_heads,
            self.shape.scale,
            None if self.sinks is None else self.sinks.cpu(),
            self.softcap,
        )

    def _by_part(self) -> Iterator[tuple[Part, torch.Tensor, torch.Tensor, slice]]:
        """Per part: its scaled queries, what was fetched for it, and its rows of all queries."""
        return zip(self.parts, self.scaled, self.fetched, self.rows, strict=True)

    def _estimated(self, attended: Attended) -> Attended:
        """Adds what stands in for entries that were not read (`estimate_unfetched`)."""
        if not any(part.row.stored and part.row.stored.means for part in self.parts):
            return attended
        # On the host, where the means are.
        out = torch.zeros_like(attended[0], device="cpu")
        lse = torch.full_like(attended[1], -math.inf, device="cpu")
        for part, query, ids, rows in self._by_part():
            stored = part.row.stored
            if stored is not None and stored.means is not None:
                out[rows], lse[rows] = part.row.estimate(
                    stored.means, query, ids, part.visible, self.softcap
                )
        return ops.merge_attention(
            *attended, out.to(self.queries.device), lse.to(self.queries.device)
        )

    def _observe(self, ahead: Ahead | None) -> None:
        """Tell each sequence what its true queries selected, and the meter what was foreseen."""
        meter = self.store.meter
        judging = ahead is not None and meter.prefetch.take_step(ahead.seconds, self.waited)
        for part, query, ids, _ in self._by_part():
            if part.row.index() is None:
                continue
            part.row.observe(query, ids)
            if ahead is not None and judging:
                meter.prefetch.add_accuracy(*ahead.caught(part.row, ids))

    def _measure(self, lse: torch.Tensor, layer: int, seed: int) -> None:
        """Recall of each sequence: how much attention what was fetched holds."""
        resident_lse = self._attend_resident()[1]
        for part, query, ids, rows in self._by_part():
            index = part.row.index()
            if index is None or part.visible is not None:
                continue
            attended = recall.Attended(query, ids, lse[rows], resident_lse[rows], self.softcap)
            budget, sample = budget_of(part.row), self.store.config.recall_sample
            mass = recall.measure(part.row, index, attended, budget, sample, seed)
            if mass is not None:
                self.store.meter.add_mass(layer, mass)
                part.row.note_mass(mass.share)
