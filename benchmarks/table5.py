"""Maintenance: do clusters stay good while a context grows by tokens of a real text?

A recorded layer is fed to a `Sequence` token by token, as decoding would: prefill, then steps that
select, note what they selected, and let tokens leave the window. Reads are those of the store's own
planner, with nothing cached.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import plots, workload
from benchmarks.harness import Report
from swarm_kv import SwarmConfig, maintenance, selectors
from swarm_kv.index import Index, members_of
from swarm_kv.replay import PM9A3
from swarm_kv.sequence import Geometry, Sequence
from swarm_kv.store import NOTHING, Store, Wanted
from swarm_kv.trace import LayerTrace

DRIVES = 4
TIMES = (1, 2, 4, 8, 16, 32)
"""Steps after the first token left the window: the columns of Table 5."""
LATER = 256
"""Queries, none of which an assignment has seen, that distances are measured on too."""
DISTANCES = {"min_size": 21.376, "min_diff": 3.019, "swarm": 1.012}
"""Table 5 at t = 32."""


PAPER = (
    "after 32 steps the distance to medoids is 21.376 times (Min-Size), 3.019 times (Min-Diff) and "
    "1.012 times (SWARM) what it was."
)
REMARK = (
    "distances are Jaccard's, not by the count of all pairs, so that no start is near 0 and no "
    "ratio can be as large as the paper's."
)


@dataclasses.dataclass(frozen=True)
class Parameters:
    model: str = "smollm2"
    text: str = "topics"
    layers: tuple[int, ...] = (10,)
    context: int = 5632
    steps: int = 1024
    """Decoding steps after the window is full of decoded tokens."""
    probes: int = 32
    """Queries that recall is measured with, at the start and at the end."""
    distance_steps: int = 256
    """Length of the replay that Table 5 is about."""


QUICK = {"context": 1024, "steps": 768, "probes": 8, "distance_steps": 32}
"""The replay of `distance_steps` needs LATER + window steps of text behind it."""

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "sequence, merged only": {"recluster": "off"},
    "swarm (Eq. 9), merged only": {"maintenance": "swarm", "recluster": "off"},
    "swarm (Eq. 9), re-clustered": {"maintenance": "swarm"},
    "medoid selector, re-clustered": {"selector": "medoid", "clusterer": "swarm"},
    "medoid selector, sequence, merged only": {
        "selector": "medoid",
        "clusterer": "swarm",
        "recluster": "off",
    },
    "medoid selector, swarm (Eq. 9), merged only": {
        "selector": "medoid",
        "clusterer": "swarm",
        "maintenance": "swarm",
        "recluster": "off",
    },
}


@dataclasses.dataclass(frozen=True)
class Quality:
    """Means over queries: attention mass of what was read over that of the exact best, and I/O."""

    recall: float
    requests: float
    bytes: float
    seconds: float


class Replay:
    """One recorded layer in a sequence of its own, on drives in memory."""

    def __init__(self, layer: LayerTrace, context: int, **settings: Any) -> None:
        # In 16 bits, so that a request weighs against an entry as it does for a model on a GPU.
        self._q, self._k, self._v = (tensor.half() for tensor in (layer.q, layer.k, layer.v))
        self._scale = layer.scale
        self.config = SwarmConfig(
            paths=[f"/{number}" for number in range(DRIVES)],
            engine="memory",
            dram_bytes="1GiB",
            initial_fill="none",
            device_model=(PM9A3.t_base, PM9A3.t_transfer),
            **settings,
        )
        self._observes = maintenance.needs_bits(maintenance.resolve(self.config.maintenance))
        self.store = Store(self.config)
        shape = Geometry(
            layer.q.shape[0], layer.k.shape[0], layer.k.shape[2], torch.float16, layer.scale
        )
        self.sequence = Sequence(
            self.store, shape, f"layer {layer.layer}", selectors.resolve(self.config.selector)
        )
        self.sequence.ingest(self._k[:, :context], self._v[:, :context], self._q[:, :context])
        self.sequence.prepare()

    def step(self) -> None:
        """Decode the next token."""
        sequence, at = self.sequence, len(self.sequence)
        sequence.prepare()
        sequence.append(self._k[:, at : at + 1], self._v[:, at : at + 1])
        query, index = self._query(at), sequence.index()
        assert index is not None
        # What was selected says nothing to a strategy that does not look at it.
        wanted = self._wanted(query, index) if self._observes else NOTHING
        sequence.observe(query, wanted)
        sequence.settle()

    def pairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int64: each copy of each entry in a cluster, and the medoid of its cluster."""
        assert self.sequence.stored is not None
        index = self.sequence.stored.index
        offsets = index.offsets.long()
        medoids = index.members[offsets[index.owner.long()]].long()
        entries = index.members[: int(offsets[-1])].long()
        return entries, medoids.repeat_interleave(offsets.diff())

    def _query(self, at: int) -> torch.Tensor:
        return self._q[:, at : at + 1].float() * self._scale

    def _select(self, query: torch.Tensor, index: Index) -> tuple[torch.Tensor, torch.Tensor]:
        budget = max(1, round(self.config.sparsity * len(self.sequence)))
        return self.sequence.selector(query, index, budget, self.config)

    def _wanted(self, query: torch.Tensor, index: Index) -> torch.Tensor:
        return members_of(index.offsets, index.members, *self._select(query, index))

    def attention(self, at: int) -> torch.Tensor:
        """float32 [stored entries]: what token `at` gives to each, mean over heads."""
        query = self._q[:, at].float() * self._scale
        rows = query.view(self._k.shape[0], -1, query.shape[1])
        scores = rows @ self._k[:, : at + 1].float().mT
        first = len(self.sequence.sinks)
        return scores.softmax(-1).mean((0, 1))[first : first + self.sequence.limit]

    def quality(self, tokens: range) -> Quality:
        """Of selections by the queries of `tokens`, which come after what is stored."""
        sequence = self.sequence
        index = sequence.index()
        assert index is not None
        assert sequence.stored is not None
        self.store.background.submit(lambda check: None).result()  # whose reads would count too
        recalls = []
        before = self.store.counters()["stream"]
        seconds = 0.0
        for at in tokens:
            clusters, entries = self._select(self._query(at), index)
            weights = self.attention(at)
            chosen = members_of(index.offsets, index.members, clusters, entries)
            budget = min(max(1, round(self.config.sparsity * len(sequence))), len(weights))
            recalls.append(float(weights[chosen].sum() / torch.topk(weights, budget).values.sum()))
            then = self.store.counters()["drives"]
            wanted = Wanted(sequence.stored.segments, clusters, entries, sequence.limit)
            with self.store.fetch([wanted], purpose="stream") as fetch:
                fetch.complete()
            seconds += max(
                (now["reads"] - old["reads"]) * PM9A3.t_base
                + (now["read_bytes"] - old["read_bytes"]) * PM9A3.t_transfer
                for now, old in zip(self.store.counters()["drives"], then, strict=True)
            )
        after = self.store.counters()["stream"]
        return Quality(
            statistics.mean(recalls),
            (after["requests"] - before["requests"]) / len(tokens),
            (after["bytes"] - before["bytes"]) / len(tokens),
            seconds / len(tokens),
        )


def activity(layer: LayerTrace, sinks: int, tokens: range, sparsity: float) -> torch.Tensor:
    """bool [tokens, entries]: which entries behind the sinks the queries of `tokens` activate.

    Those whose attention is at least that of the weakest of the best `sparsity` share, of all that
    come before the first of the tokens.
    """
    k = layer.k[:, : tokens.start].float()
    rows = []
    for at in tokens:
        query = (layer.q[:, at].float() * layer.scale).view(k.shape[0], -1, k.shape[2])
        weights = (query @ k.mT).softmax(-1).mean((0, 1))[sinks:]
        weakest = torch.topk(weights, round(sparsity * len(weights))).values[-1]
        rows.append(weights >= weakest)
    return torch.stack(rows)


def distance(active: torch.Tensor, entries: torch.Tensor, medoids: torch.Tensor) -> float:
    """Mean Jaccard distance of entries to their medoids over the steps of `active`."""
    both = (active[:, entries] & active[:, medoids]).sum(0).double()
    either = (active[:, entries] | active[:, medoids]).sum(0).double()
    return float((1 - both / either.clamp(min=1)).mean())


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Clusters of one layer while tokens leave the window one by one.

    Attributes:
        pairs: by step, see `Replay.pairs`; 0 is the start.
        before: stored entries at the start; later ones are new.
        seen: activity of the queries that the assignment was made with, see `activity`.
        later: the same of queries that come after them.
    """

    pairs: dict[int, tuple[torch.Tensor, torch.Tensor]]
    before: int
    seen: torch.Tensor
    later: torch.Tensor


def grouped(
    layer: LayerTrace, context: int, steps: int, times: tuple[int, ...], strategy: str
) -> Grouped:
    """Tokens leave the window one by one, into clusters by Algorithm 1."""
    replay = Replay(
        layer,
        context,
        clusterer="swarm",
        layout="clusters",
        selector="medoid",
        maintenance=strategy,
        recluster="off",
        flush=1,
    )
    sinks, window = replay.config.sinks, replay.config.window
    # Fill the window with tokens whose life in it is observed; the prefill's leave unseen.
    for _ in range(window):
        replay.step()
    before = replay.sequence.limit
    kept = {0: replay.pairs()}
    for step in range(1, steps + 1):
        replay.step()
        if step in times or step == steps:
            kept[step] = replay.pairs()
    end = len(replay.sequence)
    return Grouped(
        kept,
        before,
        activity(layer, sinks, range(end - window, end), replay.config.sparsity),
        activity(layer, sinks, range(end, end + LATER), replay.config.sparsity),
    )


@dataclasses.dataclass(frozen=True)
class Distances:
    """One strategy on one layer: mean distance to medoids over that at the start.

    Attributes:
        whole: by step, over all entries, by the queries that the assignment was made with.
        unseen: the same by queries that come later.
        fresh: by step, over the entries that left the window since the start alone, by the later
            queries; relative to the start of the others too.
    """

    whole: dict[int, float]
    unseen: dict[int, float]
    fresh: dict[int, float]


def table5(
    layer: LayerTrace, context: int, steps: int, times: tuple[int, ...], strategy: str
) -> Distances:
    """Distances while `grouped`."""
    found = grouped(layer, context, steps, times, strategy)
    start = (
        distance(found.seen, *found.pairs[0]),
        distance(found.later, *found.pairs[0]),
    )
    whole, unseen, fresh = {}, {}, {}
    for step, (entries, medoids) in found.pairs.items():
        if step == 0:
            continue
        whole[step] = distance(found.seen, entries, medoids) / start[0]
        unseen[step] = distance(found.later, entries, medoids) / start[1]
        new = entries >= found.before
        fresh[step] = distance(found.later, entries[new], medoids[new]) / start[1]
    return Distances(whole, unseen, fresh)


@dataclasses.dataclass(frozen=True)
class Grown:
    """One way on one layer, before the first decoding step and after the last."""

    way: str
    layer: int
    start: Quality
    end: Quality


def grown(layer: LayerTrace, parameters: Parameters, way: str) -> Grown:
    replay = Replay(layer, parameters.context, **WAYS[way])
    spread = range(0, LATER, LATER // parameters.probes)

    def measure() -> Quality:
        at = len(replay.sequence)
        return replay.quality(range(at, at + spread.stop, spread.step))

    start = measure()
    for _ in range(parameters.steps):
        replay.step()
    return Grown(way, layer.layer, start, measure())


def recorded(parameters: Parameters) -> list[LayerTrace]:
    steps = LATER + max(parameters.steps, parameters.distance_steps + 256) - workload.WINDOW
    return workload.recorded(
        parameters.model,
        parameters.text,
        context=parameters.context,
        steps=steps,
        layers=parameters.layers,
    )


def run(parameters: Parameters, report: Report) -> None:
    """Table 5, and recall after a long stretch of decoding."""
    layers = recorded(parameters)
    bar = functools.partial(tqdm, disable=None)
    times = tuple(t for t in TIMES if t <= parameters.distance_steps)
    for strategy, paper in DISTANCES.items():
        rows = [
            table5(layer, parameters.context, parameters.distance_steps, times, strategy)
            for layer in bar(layers, desc=f"Table 5, {strategy}")
        ]
        for title, pick in _COLUMNS.items():
            for step in sorted({*times, parameters.distance_steps}):
                values = [pick(row)[step] for row in rows]
                report.measure(
                    f"Table 5, {strategy}: distance to medoids at t = {step}, {title}",
                    "of the start",
                    values,
                )
        if strategy == "swarm":
            at = times[-1]
            for title in ("all entries, observed queries", "all entries, later queries"):
                report.at_most(
                    f"Table 5, swarm: distance at t = {at}, {title}",
                    statistics.mean(_COLUMNS[title](row)[at] for row in rows),
                    1.05,
                )
        report.note(f"Table 5 of the paper, {strategy} at t = 32: {paper}")
    results: dict[str, list[Grown]] = {
        way: [grown(layer, parameters, way) for layer in bar(layers, desc=way)] for way in WAYS
    }
    for way, ends in results.items():
        for title, value in _QUALITIES.items():
            for when in ("start", "end"):
                report.measure(
                    f"{way}: {title}, {when}",
                    title.split(", ")[-1],
                    [value(getattr(one, when)) for one in ends],
                )
    default = results["default"]
    kept = statistics.mean(one.end.recall for one in default) / statistics.mean(
        one.start.recall for one in default
    )
    report.at_least(f"default: recall after {parameters.steps} tokens / at the start", kept, 0.95)
    per_second = {
        way: statistics.mean(one.end.recall / one.end.seconds for one in ends)
        for way, ends in results.items()
    }
    for way in ("sequence, merged only", "swarm (Eq. 9), merged only"):
        report.at_least(
            f"recall per I/O second at the end, default / {way}",
            per_second["default"] / per_second[way],
            1.0,
        )
    report.note(
        "16-bit entries on four drives by the device model of a PM9A3, nothing "
        "cached; recall is the mass of what is read over that of the exact best tenth"
    )


_COLUMNS: dict[str, Callable[[Distances], dict[int, float]]] = {
    "all entries, observed queries": lambda row: row.whole,
    "all entries, later queries": lambda row: row.unseen,
    "new entries, later queries": lambda row: row.fresh,
}
_QUALITIES: dict[str, Callable[[Quality], float]] = {
    "recall, share": lambda one: one.recall,
    "reads, requests": lambda one: one.requests,
    "volume, bytes": lambda one: one.bytes,
    "I/O time, s": lambda one: one.seconds,
}


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Distance to medoids by step, and recall at the start and the end."""
    plots.draw(
        result,
        path,
        [
            plots.Panel(
                r"Table 5, (?P<series>\w+): distance to medoids at t = (?P<x>\d+), "
                "all entries, later queries",
                "decoding step",
                "distance to medoids (of the start)",
                log_x=True,
            ),
            plots.Panel(
                r"(?P<x>.+): recall, share, (?P<series>start|end)",
                "",
                "recall (share of the exact best)",
                kind="bars",
            ),
        ],
    )
