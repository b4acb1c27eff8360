"""One decoding step in one layer, for all sequences of a batch at once.

    prepare -> append -> select -> submit -> attend (what is in memory) -> complete, attend, merge
    -> observe -> settle

What a sequence gets does not depend on which others are in the batch: each has its own selection
and its own lists of entries; only reads and calls of operators are shared.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from typing import TypeVar

import torch

from . import ops, recall
from .index import members_of
from .selectors import Selector
from .sequence import Sequence
from .store import NOTHING, Store, Wanted

T = TypeVar("T")
Attended = tuple[torch.Tensor, torch.Tensor]
"""out [rows, heads, head_dim] and lse [rows, heads]."""


@dataclasses.dataclass(frozen=True)
class Part:
    """What one sequence brings to a step.

    Attributes:
        row: the sequence.
        query: [heads, n, head_dim], rotated, not scaled; n >= 1.
        key, value: [kv_heads, n, head_dim]: the queries' own tokens.
        visible: bool [entries, new ones included], what the mask shows; None for all.
    """

    row: Sequence
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    visible: torch.Tensor | None


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


@dataclasses.dataclass(frozen=True)
class Cost:
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
    if row.config.sparsity == 1.0:
        chosen = NOTHING, torch.arange(row.limit, dtype=torch.int64)
    else:
        chosen = selector(query, index, round(share * budget_of(row)), row.config)
    return Wanted(row.stored.segments, *chosen, row.limit)


def budget_of(row: Sequence) -> int:
    """Stored entries that a step reads."""
    return max(1, round(row.config.sparsity * len(row)))


class Step:
    """A decoding step under way.

    Args:
        store: where the entries of all rows lie.
        parts: one per sequence that has new tokens; of one geometry.
        softcap: see `ops.sparse_attention`.
        sinks: [heads], gpt-oss's logits without a value, or None.
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
        self.queries = torch.cat([part.query.transpose(0, 1) for part in parts])
        self.sinks = None if sinks is None else sinks.to(self.queries.dtype)
        ends = itertools.accumulate(part.query.shape[1] for part in parts)
        self.rows = [  # of `queries`, by part
            slice(end - part.query.shape[1], end) for end, part in zip(ends, parts, strict=True)
        ]
        self.fetched: list[list[torch.Tensor]] = [[NOTHING] for _ in parts]
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
            Per part, out [n, heads, head_dim] in the accumulation dtype.
        """
        for part in self.parts:
            part.row.prepare()
            part.row.append(part.key, part.value)
        wanted = [
            select(part.row, query, selector)
            for part, query in zip(self.parts, self.scaled, strict=True)
        ]
        attended = self._read_and_attend(wanted, ahead)
        fetched = [torch.cat(seen) for seen in self.fetched]
        self._observe(fetched, ahead)
        if recall.due(number, layer, self.store.config.recall_every):
            self._measure(fetched, attended[1], layer, 1024 * number + layer)
        attended = self._estimated(fetched, attended)
        for part in self.parts:
            part.row.settle()
        return [attended[0][rows] for rows in self.rows]

    def _read_and_attend(self, wanted: list[Wanted], ahead: Ahead | None) -> Attended:
        if not any(one.segments for one in wanted):
            return self._attend(self._resident([NOTHING] * len(wanted)), self.sinks)
        began = time.perf_counter()
        with self.store.fetch(wanted, ahead=None if ahead is None else ahead.fetch) as fetch:
            submitting = time.perf_counter() - began
            # What is in memory is attended while the reads are under way.
            attended = self._attend(self._resident(self._shown(fetch.resident)), self.sinks)
            for arrived in self._timed(fetch.rounds()):
                part = self._attend(self._per_query(self._shown(arrived)), None)
                attended = ops.merge_attention(*attended, *part)
        share, predicting = (0.0, 0.0) if ahead is None else (ahead.share, ahead.seconds)
        self.cost = Cost(share, predicting, submitting, self.waited)
        return attended

    def _timed(self, rounds: Iterator[T]) -> Iterator[T]:
        """The same rounds; counts the time that each is waited for."""
        while True:
            began = time.perf_counter()
            arrived = next(rounds, None)
            self.waited += time.perf_counter() - began
            if arrived is None:
                return
            yield arrived

    def _shown(self, pieces: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        """Slots of the entries that the mask shows, by row; takes note of what was fetched."""
        slots = []
        for part, seen, piece in zip(self.parts, self.fetched, pieces, strict=True):
            seen.append(piece[0])
            slots.append(part.row.shown(*piece, part.visible)[1])
        return slots

    def _resident(self, fetched: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Per query: what was fetched, sinks, and the window up to the query's own token."""
        lists = []
        for part, slots in zip(self.parts, fetched, strict=True):
            row, count = part.row, part.query.shape[1]
            if part.visible is None and count == 1:
                lists.append([slots, row.sinks.slots, row.window.slots])
                continue
            resident = row.resident(part.visible)
            whole = resident.numel()
            lists += [[slots, resident[: whole - (count - 1 - i)]] for i in range(count)]
        return lists

    def _per_query(self, slots: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        return [
            [own]
            for part, own in zip(self.parts, slots, strict=True)
            for _ in range(part.query.shape[1])
        ]

    def _attend(self, lists: list[list[torch.Tensor]], sinks: torch.Tensor | None) -> Attended:
        """Attention of each query to its own list of entries, given by slots in bytes."""
        sizes = (sum(piece.numel() for piece in pieces) for pieces in lists)
        slots = torch.cat(list(itertools.chain.from_iterable(lists)))
        return ops.sparse_attention(
            self.queries,
            self.store.pool(self.shape.dtype),
            slots // self.shape.dtype.itemsize,
            torch.tensor([0, *itertools.accumulate(sizes)]),
            self.shape.kv_heads,
            self.shape.scale,
            sinks,
            self.softcap,
        )

    def _estimated(self, fetched: list[torch.Tensor], attended: Attended) -> Attended:
        """Adds what stands in for entries that were not read (`estimate_unfetched`)."""
        if not any(part.row.stored and part.row.stored.means for part in self.parts):
            return attended
        out, lse = torch.zeros_like(attended[0]), torch.full_like(attended[1], -math.inf)
        for part, query, ids, rows in zip(self.parts, self.scaled, fetched, self.rows, strict=True):
            stored = part.row.stored
            if stored is not None and stored.means is not None:
                out[rows], lse[rows] = part.row.estimate(
                    stored.means, query, ids, part.visible, self.softcap
                )
        return ops.merge_attention(*attended, out, lse)

    def _observe(self, fetched: list[torch.Tensor], ahead: Ahead | None) -> None:
        """Tell each sequence what its true queries selected, and the meter what was foreseen."""
        meter = self.store.meter
        judging = ahead is not None and meter.prefetch.take_step(ahead.seconds, self.waited)
        for part, query, ids in zip(self.parts, self.scaled, fetched, strict=True):
            if part.row.index() is None:
                continue
            part.row.observe(query, ids)
            if ahead is not None and judging:
                meter.prefetch.add_accuracy(*ahead.caught(part.row, ids))

    def _measure(
        self, fetched: list[torch.Tensor], lse: torch.Tensor, layer: int, seed: int
    ) -> None:
        """Recall of each sequence: how much attention what was fetched holds."""
        resident_lse = self._attend(self._resident([NOTHING] * len(self.parts)), self.sinks)[1]
        for part, query, ids, rows in zip(self.parts, self.scaled, fetched, self.rows, strict=True):
            index = part.row.index()
            if index is None or part.visible is not None:
                continue
            attended = recall.Attended(query, ids, lse[rows], resident_lse[rows], self.softcap)
            budget, sample = budget_of(part.row), self.store.config.recall_sample
            mass = recall.measure(part.row, index, attended, budget, sample, seed)
            if mass is not None:
                self.store.meter.add_mass(layer, mass)
                part.row.note_mass(mass.share)
