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
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.drives import DriveModel, Drives
from benchmarks.harness import Report
from swarm_kv import SwarmConfig, selectors
from swarm_kv.index import Index, members_of
from swarm_kv.sequence import Geometry
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
class Step:
    """One decoding step of one layer, all rows of the batch together.

    Attributes:
        seconds: from the call of fetch until the last entry was delivered.
        selecting: seconds that selecting took, before.
        bytes, requests: read from the drives.
        busiest: seconds that the drive with most to do needs by its model: what the plan allows.
        recall: attention mass on stored entries that the selection has, mean over rows; nan where
            it was not asked for.
        selected: entries.
    """

    seconds: float
    selecting: float
    bytes: float
    requests: float
    busiest: float
    recall: float
    selected: float


@dataclasses.dataclass(frozen=True)
class Cost(Step):
    """Means over steps."""

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


@dataclasses.dataclass(frozen=True)
class Prefilled:
    """The context of one layer, ready to be written to drives.

    Attributes:
        layer: recorded; its test queries are the steps.
        config: settings; of its paths only their number counted.
        index: of the stored entries.
        sinks: tokens before them.
        written: arguments of `Store.write`.
    """

    layer: LayerTrace
    config: SwarmConfig
    index: Index
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
        shape = Geometry(
            layer.q.shape[0], layer.k.shape[0], layer.k.shape[2], layer.k.dtype, layer.scale
        )
        row = Row(store, shape, f"layer {layer.layer}", selectors.resolve(config.selector))
        context = layer.settings.context + config.window
        row.ingest(layer.k[:, :context], layer.v[:, :context], layer.q[:, :context])
        assert row.stored is not None
        index = row.stored.index
        k, v, offsets, members, label, activations, _, *rest = store.written
        # The store's own lists end with it.
        index = dataclasses.replace(
            index, offsets=index.offsets.clone(), members=index.members.clone()
        )
        written = k, v, offsets, members, label, activations, config.initial_fill, *rest
        return Prefilled(layer, config, index, len(row.sinks), written)
    finally:
        store.close()


def _room(layer: LayerTrace, batch: int) -> int:
    """Bytes of memory in which all entries can be cached and indexed."""
    entry = 2 * layer.k.shape[0] * layer.k.shape[2] * layer.k.element_size()
    return 2 * STAGING + batch * layer.settings.context * (3 * entry + 512)


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
        self.segments = [store.write(*ready.written) for _ in range(batch)]
        self._selector = selectors.resolve(self.config.selector)
        self._sinks = ready.sinks
        self._charged = 0

    @property
    def entries(self) -> int:
        """Stored entries of a sequence."""
        return self.index.limit

    def limit_cache(self, share: float) -> None:
        """Let the cluster cache hold `share` of the stored entries, and no more."""
        self.store.charge(-self._charged)
        counters = self.store.counters()
        dram = counters["dram"]
        cached = int(share * self.entries * len(self.segments)) * counters["cached_entry_bytes"]
        held = dram["used"] - dram["cache"]
        self._charged = dram["limit"] - held - cached
        self.store.charge(self._charged)

    def steps(
        self, count: int, *, first: int = 0, judged: bool = True, rows: int | None = None
    ) -> list[Step]:
        """Decode test queries from `first` on; rows take queries one after another.

        Args:
            count: steps. The queries begin anew where the recording ends.
            first: query of the first step's first row.
            judged: whether to find the recall, which takes longer than the rest.
            rows: only so many sequences of the batch.
        """
        tokens, rows = self.layer.positions, rows or len(self.segments)
        return [
            self._step(
                [int(tokens[(first + number * rows + row) % len(tokens)]) for row in range(rows)],
                judged,
            )
            for number in range(count)
        ]

    def _step(self, tokens: Sequence[int], judged: bool) -> Step:
        began = time.perf_counter()
        chosen = [self.select(token) for token in tokens]
        selecting = time.perf_counter() - began
        wanted = [
            Wanted((segment,), clusters, entries, self.entries)
            for segment, (clusters, entries) in zip(self.segments, chosen, strict=False)
        ]
        before = self._read()
        began = time.perf_counter()
        with self.store.fetch(wanted) as fetch:
            for _ in fetch.rounds():
                pass
            seconds = time.perf_counter() - began
        requests, read = self._read() - before
        recall, selected = [], []
        for token, (clusters, entries) in zip(tokens, chosen, strict=True):
            members = members_of(self.index.offsets, self.index.members, clusters, entries)
            selected.append(len(members))
            if judged:
                attention = self._attention(token)
                recall.append(float(attention[members].sum() / attention.sum()))
        return Step(
            seconds,
            selecting,
            float(read.sum()),
            float(requests.sum()),
            max(
                max(many / model.iops, much / model.bytes_per_second)
                for many, much, model in zip(
                    requests.tolist(), read.tolist(), self.models, strict=True
                )
            ),
            statistics.mean(recall) if recall else float("nan"),
            statistics.mean(selected),
        )

    def select(self, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Clusters and single entries that the query of a token selects."""
        query = self.layer.at(torch.tensor([token])).float() * self.layer.scale
        tokens = self._sinks + self.entries + self.config.window
        budget = max(1, round(self.config.sparsity * tokens))
        return self._selector(query, self.index, budget, self.config)

    def _attention(self, token: int) -> torch.Tensor:
        """float32 [stored entries]: what a test query gives to each, mean over heads."""
        layer = self.layer
        query = layer.at(torch.tensor([token]))[:, 0].float() * layer.scale
        rows = query.view(layer.k.shape[0], -1, query.shape[1])
        scores = rows @ layer.k[:, : token + 1].float().mT
        return scores.softmax(-1).mean((0, 1))[self._sinks : self._sinks + self.entries]

    def _read(self) -> torch.Tensor:
        """int64 [2, drives]: requests and bytes read so far."""
        drives = self.store.counters()["drives"]
        return torch.tensor([[drive[key] for drive in drives] for key in ("reads", "read_bytes")])


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
    own: dict[str, Any] = {"paths": drives.paths, "dram_bytes": _room(layer.layer, batch)}
    if drives.throttled and len(set(drives.models)) == 1:
        own["device_model"] = drives.models[0].costs  # a busy machine would measure them wrongly
    config = dataclasses.replace(layer.config, **{**own, **settings})
    with drives.following([model.slower(1 / OPENING) for model in drives.models]):
        store = Store(config)
    try:
        with drives.unthrottled():
            decoder = Decoder(store, layer, drives.models, batch)
        decoder.limit_cache(cache)
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
    judged: bool = True,
    **settings: Any,
) -> list[Cost]:
    """Of each layer, over `steps` steps after one that warms memory up; see `decoding`."""
    found = []
    for layer in layers:
        with decoding(layer, drives, batch=batch, cache=cache, **settings) as decoder:
            decoder.steps(1, judged=False)
            found.append(mean(decoder.steps(steps, judged=judged)))
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
