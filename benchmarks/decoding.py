"""Decoding steps of one recorded layer against drives, by the package's own path.

A `Sequence` ingests the context (profile, clusters, layout, writes, all as `SwarmConfig` says);
each step then selects with a recorded query and fetches what it selected through store, scheduler
and cluster cache. What a strategy selects, how it lies and what it costs come from one run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.drives import DriveModel, Drives
from swarm_kv import SwarmConfig, selectors
from swarm_kv.sequence import Geometry
from swarm_kv.sequence import Sequence as Row
from swarm_kv.store import Store, Wanted
from swarm_kv.trace import LayerTrace

OPENING = 10
"""Times faster are the drives while a store measures them. What it plans by is how they compare,
not how slow all are."""
STAGING = 128 << 20


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of a decoding step of one layer, all rows of the batch together, or means over steps.

    Attributes:
        seconds: from the call of fetch until the last entry was delivered; on simulated devices
            (`engine="simulated"`) the time of the busiest one by its model.
        selecting: seconds that selecting took, before.
        bytes, requests: read from the drives.
        selected: entries, mean over rows.
        recall: attention mass on stored entries that the selection has, mean over rows; nan where
            it was not asked for, like `err`.
        err: relative L2 error of the attention output, mean over rows and heads.
    """

    seconds: float
    selecting: float
    bytes: float
    requests: float
    selected: float
    recall: float = math.nan
    err: float = math.nan

    @property
    def bytes_per_second(self) -> float:
        """Delivered by the drives while entries were fetched."""
        return self.bytes / self.seconds


def mean(costs: Sequence[Cost]) -> Cost:
    """Field by field."""
    fields = [field.name for field in dataclasses.fields(Cost)]
    return Cost(*(statistics.mean(getattr(cost, name) for cost in costs) for name in fields))


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
        self._charged = beyond(self.store, int(share * self.entries * len(self.rows)))
        self.store.charge(self._charged)

    def steps(
        self, count: int, *, first: int = 0, judged: bool = True, sparsity: float | None = None
    ) -> list[Cost]:
        """Decode `count` steps; rows take test queries from `first` on, one after another.

        Args:
            count, first: numbers of steps.
            judged: whether recall and error are worked out, outside what is timed.
            sparsity: share of the context that is selected; that of the settings if not given.
        """
        batch, positions = len(self.rows), self.layer.positions.tolist()
        share = sparsity or self.config.sparsity
        return [
            self._step(
                [positions[(number * batch + row) % len(positions)] for row in range(batch)],
                judged,
                share,
            )
            for number in range(first, first + count)
        ]

    def _step(self, tokens: Sequence[int], judged: bool, sparsity: float) -> Cost:
        began = time.perf_counter()
        chosen = [
            self._select(row, token, sparsity) for row, token in zip(self.rows, tokens, strict=True)
        ]
        selecting = time.perf_counter() - began
        wanted = [
            Wanted(_segments(row), clusters, entries, row.limit)
            for row, (clusters, entries) in zip(self.rows, chosen, strict=True)
        ]
        before = self.store.counters()["drives"]
        delivered: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.rows]
        began = time.perf_counter()
        with self.store.fetch(wanted) as fetch:
            for pieces in itertools.chain([fetch.resident], fetch.rounds()):
                for row, piece in zip(delivered, pieces, strict=True):
                    row.append(piece)
            seconds = time.perf_counter() - began
            found = [
                [torch.cat(parts) for parts in zip(*pieces, strict=True)] for pieces in delivered
            ]
            verdicts = [
                self._judge(row, token, ids, slots)
                for row, token, (ids, slots) in zip(self.rows, tokens, found, strict=True)
                if judged
            ]
        after = self.store.counters()["drives"]

        def read(name: str) -> list[float]:
            return [now[name] - old[name] for now, old in zip(after, before, strict=True)]

        if self.config.engine == "simulated":
            seconds = max(read("busy_seconds"))
        recall, err = (
            (statistics.mean(values) for values in zip(*verdicts, strict=True))
            if judged
            else (math.nan, math.nan)
        )
        selected = statistics.mean(len(ids) for ids, _ in found)
        return Cost(
            seconds, selecting, sum(read("read_bytes")), sum(read("reads")), selected, recall, err
        )

    def _select(self, row: Row, token: int, sparsity: float) -> tuple[torch.Tensor, torch.Tensor]:
        index = row.index()
        assert index is not None
        query = self.layer.at(torch.tensor([token])).float() * self.layer.scale
        budget = max(1, round(sparsity * len(row)))
        return row.selector(query, index, budget, self.config)

    def _judge(
        self, row: Row, token: int, ids: torch.Tensor, slots: torch.Tensor
    ) -> tuple[float, float]:
        """Recall and error of a test query that sees what is resident, and `ids` in `slots`."""
        layer, stored = self.layer, slice(len(row.sinks), len(row.sinks) + row.limit)
        k, v = (tensor[:, : token + 1].float() for tensor in (layer.k, layer.v))
        query = (layer.at(torch.tensor([token]))[:, 0].float() * layer.scale).view(
            k.shape[0], -1, k.shape[2]
        )
        scores = query @ k.mT
        true = scores.softmax(-1) @ v
        mass = scores.softmax(-1).mean((0, 1))[stored]
        recall = float(mass[ids].sum() / mass.sum())
        scores[:, :, stored] = -math.inf
        read_k, read_v = (tensor.float() for tensor in row.gather(slots))
        scores, values = torch.cat([scores, query @ read_k.mT], 2), torch.cat([v, read_v], 1)
        out, lse = scores.softmax(-1) @ values, scores.logsumexp(-1)
        assert row.stored is not None
        if row.stored.means is not None:
            flat = query.flatten(0, 1)[:, None]
            rest, rest_lse = row.estimate(row.stored.means, flat, ids, None, None)
            rest, rest_lse = rest[0].view_as(out).float(), rest_lse[0].view_as(lse).float()
            whole = torch.logaddexp(lse, rest_lse)
            out = out * (lse - whole).exp()[..., None] + rest * (rest_lse - whole).exp()[..., None]
        err = ((out - true).norm(dim=-1) / true.norm(dim=-1).clamp(min=1e-30)).mean()
        return recall, float(err)


def beyond(store: Store, cached: int, room: int = 0) -> int:
    """Bytes of `dram_bytes` beyond what is held, `cached` entries of cache, and `room` bytes."""
    counters = store.counters()
    dram = counters["dram"]
    held = dram["used"] - dram["cache"]
    return dram["limit"] - held - cached * counters["cached_entry_bytes"] - room


def _segments(row: Row) -> tuple[Any, ...]:
    assert row.stored is not None
    return row.stored.segments


@contextlib.contextmanager
def simulated(
    layer: LayerTrace,
    model: DriveModel,
    drives: int,
    *,
    batch: int = 1,
    cache: float = 0.0,
    **settings: Any,
) -> Iterator[Decoder]:
    """A `Decoder` on devices in memory that reckon the time of reads by a model.

    Args:
        layer, batch: see `Decoder`.
        model: of each device; a request takes 1 / iops + bytes / bytes_per_second.
        drives: how many.
        cache: see `Decoder.limit_cache`.
        settings: of `SwarmConfig`.
    """
    device = (1 / model.iops, 1 / model.bytes_per_second)
    paths = [f"/simulated{number}" for number in range(drives)]
    store = Store(_config(layer, batch, paths, engine="simulated", device_model=device, **settings))
    with _decoder(store, layer, batch) as decoder:
        decoder.limit_cache(cache)
        yield decoder


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
    config = _config(layer, batch, drives.paths, **settings)
    with drives.following([model.slower(1 / OPENING) for model in drives.models]):
        store = Store(config)
    with contextlib.ExitStack() as stack:
        with drives.unthrottled():
            decoder = stack.enter_context(_decoder(store, layer, batch))
        decoder.limit_cache(cache)
        yield decoder


def _config(layer: LayerTrace, batch: int, paths: Sequence[str], **settings: Any) -> SwarmConfig:
    entry = 2 * layer.k.shape[0] * layer.k.shape[2] * layer.k.element_size()
    room = batch * layer.settings.context * (3 * entry + 512)  # everything cached, and its index
    defaults = {"staging_bytes": STAGING, "dram_bytes": 2 * STAGING + room, "recall_every": 0}
    return SwarmConfig(**{"paths": paths, "recluster": "off", **defaults, **settings})


@contextlib.contextmanager
def _decoder(store: Store, layer: LayerTrace, batch: int) -> Iterator[Decoder]:
    try:
        decoder = Decoder(store, layer, batch)
        yield decoder
        decoder.rows.clear()
    finally:
        store.close()
