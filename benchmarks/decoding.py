"""Decoding steps of one recorded layer against drives, by the package's own path.

    ready = prefilled(layer, selector="codes")        # a `Sequence` ingests the context
    with decoding(ready, drives, batch=4) as decoder:
        print(mean(decoder.steps(16)).seconds)

A `Sequence` ingests the context: profile, clusters, index, all as `SwarmConfig` says. What it
writes can be put on any drives, by any placement, as often as a batch has rows. Each step then
selects with a recorded query and fetches what it selected through store, scheduler and cluster
cache: what a strategy selects, how it lies and what it costs come from one run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks import contexts
from benchmarks.drives import DriveModel, Drives
from benchmarks.harness import Report
from swarm_kv import SwarmConfig, selectors
from swarm_kv.entries import Geometry, gather
from swarm_kv.index import Index
from swarm_kv.means import ClusterMeans
from swarm_kv.sequence import Sequence as Row
from swarm_kv.store import Segment, Store, Wanted
from swarm_kv.trace import LayerTrace

OPENING = 10
"""Times faster are the drives while a store measures them. What it plans by is how they compare,
not how slow all are."""
STAGING = 128 << 20
LAID_OUT_FOR = 4
"""Drives that a layout is chosen for."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of a decoding step of one layer, all rows of the batch together, or means over steps.

    Attributes:
        seconds: from the call of fetch until the last entry was delivered; on simulated devices
            (`simulated`) the time of the busiest one by its model.
        selecting: seconds that selecting took, before.
        bytes, requests: read from the drives.
        busiest: seconds that the drive with most to do needs by its model: what the plan allows.
        selected: entries, mean over rows.
        recall: attention mass on stored entries that the selection has, mean over rows; nan where
            it was not asked for, like `err`.
        err: relative L2 error of the attention output, mean over rows and heads.
    """

    seconds: float
    selecting: float
    bytes: float
    requests: float
    busiest: float
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


@dataclasses.dataclass(frozen=True)
class Prefilled:
    """The context of one layer, ready to be written to drives.

    Attributes:
        layer: recorded; its test queries are the steps.
        config: settings; of its paths only their number counted.
        index: of the stored entries.
        means: stand in for what is not read, or None.
        sinks: tokens before them.
        written: arguments of `Store.write`.
    """

    layer: LayerTrace
    config: SwarmConfig
    index: Index
    means: ClusterMeans | None
    sinks: int
    written: tuple[Any, ...]

    @property
    def copies(self) -> float:
        """Stored copies per entry."""
        return self.index.members.numel() / self.index.entries


class _Noting(Store):
    """A store that remembers what was written to it last."""

    written: tuple[Any, ...] = ()

    def write(self, *arguments: Any, **named: Any) -> Segment:
        assert not named, "a prefill gives all by position"
        self.written = arguments
        return super().write(*arguments)


def prefilled(layer: LayerTrace, *, drives: int = LAID_OUT_FOR, **settings: Any) -> Prefilled:
    """Let a `Sequence` ingest the context of `layer`, in memory.

    Args:
        layer: see `Prefilled`.
        drives: how many a layout is chosen for.
        settings: of `SwarmConfig`.
    """
    names = [f"/{number}" for number in range(drives)]
    # Planning does not depend on how fast they are.
    memory = {"engine": "memory", "device_model": (1e-6, 1e-10), "initial_fill": "none"}
    defaults = {"recluster": "off", "recall_every": 0, "dram_bytes": _room(layer, 1)}
    own = {**defaults, "staging_bytes": STAGING, **settings}
    config = SwarmConfig(paths=names, **own)
    store = _Noting(SwarmConfig(paths=names, **{**own, **memory}))
    try:
        row = Row(store, _shape(layer), f"layer {layer.layer}", selectors.resolve(config.selector))
        context = layer.settings.context + config.window
        lse = _log_sums(layer, context, config.profile_queries)
        row.ingest(layer.k[:, :context], layer.v[:, :context], layer.q[:, :context], lse)
        assert row.stored is not None
        index = row.stored.index
        k, v, offsets, members, label, activations, _, *rest = store.written
        # The store's own lists end with it.
        index = dataclasses.replace(
            index, offsets=index.offsets.clone(), members=index.members.clone()
        )
        written = k, v, offsets, members, label, activations, config.initial_fill, *rest
        return Prefilled(layer, config, index, row.stored.means, len(row.sinks), written)
    finally:
        store.close()


@functools.lru_cache(maxsize=2)
def _log_sums(layer: LayerTrace, context: int, count: int) -> torch.Tensor:
    """See `contexts.log_sums`; of the first `context` tokens."""
    q, k, v = (tensor[:, :context].float() for tensor in (layer.q, layer.k, layer.v))
    return contexts.log_sums(q, k, v, layer.scale, count)


def _shape(layer: LayerTrace) -> Geometry:
    return Geometry(
        layer.q.shape[0], layer.k.shape[0], layer.k.shape[2], layer.k.dtype, layer.scale
    )


def _room(layer: LayerTrace, batch: int) -> int:
    """Bytes of memory in which all entries can be cached and indexed."""
    entry = 2 * layer.k.shape[0] * layer.k.shape[2] * layer.k.element_size()
    return 2 * STAGING + batch * layer.settings.context * (3 * entry + 512)


@dataclasses.dataclass(frozen=True)
class _Truth:
    """Full attention of one test query, float32.

    Attributes:
        query: [kv_heads, heads per KV head, dim], scaled.
        out: like `query`.
        mass: [stored entries], attention to each, mean over heads.
        scores: [kv_heads, heads per KV head, resident], of the tokens that are not stored.
        values: [kv_heads, resident, dim], theirs.
    """

    query: torch.Tensor
    out: torch.Tensor
    mass: torch.Tensor
    scores: torch.Tensor
    values: torch.Tensor


class Decoder:
    """`batch` sequences of one layer in a store of their own.

    Args:
        store: with room for all of it.
        ready: what each of them has; on the drives they share nothing.
        models: of the store's drives.
        batch: how many.
    """

    def __init__(
        self, store: Store, ready: Prefilled, models: Sequence[DriveModel], batch: int = 1
    ) -> None:
        self.store, self.config = store, store.config
        self.layer, self.index = ready.layer, ready.index
        self.models = tuple(models)
        self._ready = ready
        self.segments = [store.write(*ready.written) for _ in range(batch)]
        self._selector = selectors.resolve(self.config.selector)
        self._charged = 0
        self._truths: dict[int, _Truth] = {}  # budgets and caches are judged by the same queries

    @property
    def entries(self) -> int:
        """Stored entries of a sequence."""
        return self.index.limit

    def limit_cache(self, share: float) -> None:
        """Let the cluster cache hold `share` of the stored entries, and no more."""
        self.store.charge(-self._charged)
        self._charged = beyond(self.store, int(share * self.entries * len(self.segments)))
        self.store.charge(self._charged)

    def steps(
        self,
        count: int,
        *,
        first: int = 0,
        judged: bool = True,
        sparsity: float | None = None,
        rows: int | None = None,
    ) -> list[Cost]:
        """Decode test queries; rows take them one after another.

        Args:
            count: steps. The queries begin anew where the recording ends.
            first: number of the first step.
            judged: whether recall and error are worked out, outside what is timed.
            sparsity: share of the context that is selected; that of the settings if not given.
            rows: only so many sequences of the batch.
        """
        positions, rows = self.layer.positions.tolist(), rows or len(self.segments)
        share = sparsity or self.config.sparsity
        return [
            self._step(
                [positions[(number * rows + row) % len(positions)] for row in range(rows)],
                judged,
                share,
            )
            for number in range(first, first + count)
        ]

    def _step(self, tokens: Sequence[int], judged: bool, sparsity: float) -> Cost:
        began = time.perf_counter()
        chosen = [self.select(token, sparsity) for token in tokens]
        selecting = time.perf_counter() - began
        wanted = [
            Wanted((segment,), clusters, entries, self.entries)
            for segment, (clusters, entries) in zip(self.segments, chosen, strict=False)
        ]
        before, busy = self._read(), self._busy()
        delivered: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in tokens]
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
                self._judge(token, ids, slots)
                for token, (ids, slots) in zip(tokens, found, strict=True)
                if judged
            ]
        requests, read = self._read() - before
        if self.config.engine == "simulated":
            seconds = float((self._busy() - busy).max())
        busiest = max(
            max(many / model.iops, much / model.bytes_per_second)
            for many, much, model in zip(requests.tolist(), read.tolist(), self.models, strict=True)
        )
        selected = statistics.mean(len(ids) for ids, _ in found)
        recall, err = (
            (statistics.mean(values) for values in zip(*verdicts, strict=True))
            if judged
            else (math.nan, math.nan)
        )
        return Cost(
            seconds,
            selecting,
            float(read.sum()),
            float(requests.sum()),
            busiest,
            selected,
            recall,
            err,
        )

    def select(self, token: int, sparsity: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Clusters and single entries that the query of a token selects."""
        query = self.layer.at(torch.tensor([token])).float() * self.layer.scale
        tokens = self._ready.sinks + self.entries + self.config.window
        budget = max(1, round(sparsity * tokens))
        return self._selector(query, self.index, budget, self.config)

    def _judge(self, token: int, ids: torch.Tensor, slots: torch.Tensor) -> tuple[float, float]:
        """Recall and error of a test query that sees what is resident, and `ids` in `slots`."""
        if token not in self._truths:
            self._truths[token] = self._truth(token)
        truth, means = self._truths[token], self._ready.means
        recall = float(truth.mass[ids].sum() / truth.mass.sum())
        read_k, read_v = (t.float() for t in gather(self.store, _shape(self.layer), slots))
        scores = torch.cat([truth.scores, truth.query @ read_k.mT], dim=2)
        values = torch.cat([truth.values, read_v], dim=1)
        out, lse = scores.softmax(-1) @ values, scores.logsumexp(-1)
        if means is not None:
            query = truth.query.flatten(0, 1)[:, None]
            rest, rest_lse = means.estimate(query, ids.sort().values, None)
            rest, rest_lse = rest.view_as(out).float(), rest_lse.view_as(lse).float()
            whole = torch.logaddexp(lse, rest_lse)
            out = out * (lse - whole).exp()[..., None] + rest * (rest_lse - whole).exp()[..., None]
        error = (out - truth.out).norm(dim=-1) / truth.out.norm(dim=-1).clamp(min=1e-30)
        return recall, float(error.mean())

    def _truth(self, token: int) -> _Truth:
        layer, first = self.layer, self._ready.sinks
        last = first + self.entries
        k, v = (tensor[:, : token + 1].float() for tensor in (layer.k, layer.v))
        query = layer.at(torch.tensor([token]))[:, 0].float() * layer.scale
        query = query.view(k.shape[0], -1, k.shape[2])
        scores = query @ k.mT
        probs = scores.softmax(-1)
        return _Truth(
            query,
            out=probs @ v,
            mass=probs[:, :, first:last].mean((0, 1)),
            scores=torch.cat([scores[:, :, :first], scores[:, :, last:]], dim=2),
            values=torch.cat([v[:, :first], v[:, last:]], dim=1),
        )

    def _read(self) -> torch.Tensor:
        """int64 [2, drives]: requests and bytes read so far."""
        drives = self.store.counters()["drives"]
        return torch.tensor([[drive[key] for drive in drives] for key in ("reads", "read_bytes")])

    def _busy(self) -> torch.Tensor:
        """float64 [drives]: seconds that simulated devices have been busy."""
        drives = self.store.counters()["drives"]
        return torch.tensor([drive["busy_seconds"] for drive in drives], dtype=torch.float64)


def beyond(store: Store, cached: int, room: int = 0) -> int:
    """Bytes of `dram_bytes` beyond what is held, `cached` entries of cache, and `room` bytes."""
    counters = store.counters()
    dram = counters["dram"]
    held = dram["used"] - dram["cache"]
    return dram["limit"] - held - cached * counters["cached_entry_bytes"] - room


@contextlib.contextmanager
def decoding(
    layer: LayerTrace | Prefilled,
    drives: Drives,
    *,
    batch: int = 1,
    cache: float = 0.0,
    **settings: Any,
) -> Iterator[Decoder]:
    """A `Decoder` on stand-in drives, which write without limits and read by their models.

    Args:
        layer: with its context ingested or not.
        drives: where it stores.
        batch: see `Decoder`.
        cache: see `Decoder.limit_cache`.
        settings: of `SwarmConfig`. To what is `prefilled` only those that matter afterwards, such
            as the placement, can be given.
    """
    if isinstance(layer, LayerTrace):
        layer, settings = prefilled(layer, drives=len(drives.models), **settings), {}
    own = {**drives.settings, "dram_bytes": _room(layer.layer, batch)}
    config = dataclasses.replace(layer.config, **{**own, **settings})
    with drives.following([model.slower(1 / OPENING) for model in drives.models]):
        store = Store(config)
    with contextlib.ExitStack() as stack:
        with drives.unthrottled():
            decoder = stack.enter_context(_decoder(store, layer, drives.models, batch))
        decoder.limit_cache(cache)
        yield decoder


@contextlib.contextmanager
def simulated(
    layer: LayerTrace | Prefilled,
    model: DriveModel,
    drives: int,
    *,
    batch: int = 1,
    cache: float = 0.0,
    **settings: Any,
) -> Iterator[Decoder]:
    """A `Decoder` on devices in memory that reckon what reads take.

    Args:
        layer, batch, cache, settings: see `decoding`.
        model: of each device; a request takes 1 / iops + bytes / bytes_per_second.
        drives: how many.
    """
    if isinstance(layer, LayerTrace):
        layer, settings = prefilled(layer, drives=drives, **settings), {}
    own = {
        "paths": [f"/{number}" for number in range(drives)],
        "engine": "simulated",
        "device_model": (1 / model.iops, 1 / model.bytes_per_second),
        "dram_bytes": _room(layer.layer, batch),
    }
    store = Store(dataclasses.replace(layer.config, **{**own, **settings}))
    with _decoder(store, layer, [model] * drives, batch) as decoder:
        decoder.limit_cache(cache)
        yield decoder


@contextlib.contextmanager
def _decoder(
    store: Store, ready: Prefilled, models: Sequence[DriveModel], batch: int
) -> Iterator[Decoder]:
    try:
        decoder = Decoder(store, ready, models, batch)
        yield decoder
        decoder.segments.clear()
    finally:
        store.close()


def costs(
    layers: Sequence[Prefilled],
    drives: Drives,
    steps: int,
    *,
    batch: int = 1,
    cache: float = 0.0,
    sparsity: float | None = None,
    like: Sequence[Cost] | None = None,
    **settings: Any,
) -> list[Cost]:
    """Of each layer, over `steps` steps after one that warms memory up; see `decoding`.

    Args:
        layers, drives, batch, cache, settings: see `decoding`.
        steps, sparsity: see `Decoder.steps`.
        like: costs of the same selections from elsewhere, such as from other drives. Their recall
            and error are taken over, for to find them takes longer than the rest.
    """
    found = []
    for number, layer in enumerate(layers):
        with decoding(layer, drives, batch=batch, cache=cache, **settings) as decoder:
            decoder.steps(1, judged=False, sparsity=sparsity)
            cost = mean(decoder.steps(steps, judged=like is None, sparsity=sparsity))
        if like is not None:
            cost = dataclasses.replace(cost, recall=like[number].recall, err=like[number].err)
        found.append(cost)
    return found


def measure(report: Report, title: str, layers: Sequence[Cost]) -> None:
    """Tell what the steps of some layers cost; a repetition is a layer."""
    rows: dict[str, tuple[str, Callable[[Cost], float]]] = {
        "fetch": ("s", lambda cost: cost.seconds),
        "throughput": ("steps/s", lambda cost: 1 / cost.seconds),
        "throughput with selection": (
            "steps/s",
            lambda cost: 1 / (cost.seconds + cost.selecting),
        ),
        "bandwidth": ("B/s", lambda cost: cost.bytes_per_second),
        "recall": ("share", lambda cost: cost.recall),
    }
    for name, (unit, value) in rows.items():
        report.measure(f"{title}: {name}", unit, [value(cost) for cost in layers])
