"""Fig. 14 of the paper: what deduplication and balance save, in latency and in bytes read.

Clusters and selections come from recorded activity of a real model; every step is one fetch, alone
on the drives, through the real store. All strategies read from the same layout with the same
coalescing and submission; they differ in what is read once and in which copy is read:

| strategy | an entry selected several times | its copies |
|---|---|---|
| `swarm` | is read once | balanced over the drives |
| `dedup_only` | is read once | the first |
| `balance_only` | is read each time | balanced over the drives |
| `static` | is read each time | where it was selected |
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import plots, workload
from benchmarks.drives import DriveModel, Drives, checked_drives, drive_sets
from benchmarks.harness import Report
from swarm_kv import SwarmConfig, clusterers, selectors
from swarm_kv.index import Index
from swarm_kv.medoids import Medoids
from swarm_kv.simulate import simulate_selections
from swarm_kv.store import Store, Wanted
from swarm_kv.trace import LayerTrace
from swarm_kv.tune import coded, signatures

HEADS, DIM = 8, 128
ENTRY_BYTES = 2 * HEADS * DIM * 2
"""K and V of Qwen3-32B in 16 bits: 4 KiB."""
DRIVE_BYTES = 192 << 20
ABLATIONS = ("static", "balance_only", "dedup_only")
STRATEGIES = ("swarm", *ABLATIONS)
PAPER_LATENCY, PAPER_VOLUME = 2.57, 1.24
"""Factors against `swarm`, averaged over the three ablations."""
UNCAPPED = 255
OPENING = 10
"""Times faster are the drives while they are measured."""

Selection = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """What is scheduled.

    Attributes:
        placement: of clusters on drives.
        max_replicas: clusters that one entry may be in. The paper has no limit.
        rows: sequences of a batch that share the context: consecutive test queries.
    """

    name: str
    placement: str
    max_replicas: int = UNCAPPED
    rows: int = 1


CASES = (
    Case("Algorithm 1, Eq. 7", "round_robin"),
    Case("Algorithm 1, whole clusters", "sequential"),
    Case("3 copies, whole clusters", "sequential", max_replicas=3),
    Case("Algorithm 1, whole clusters, 4 sequences", "sequential", rows=4),
)
"""The paper's; the default placement; the default of `max_replicas` too; and a batch."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer's clusters, and what its test queries select, step by step and row by row."""

    entries: int
    offsets: torch.Tensor
    members: torch.Tensor
    steps: list[list[Selection]]


@dataclasses.dataclass(frozen=True)
class Cost:
    """Means over the steps of all layers.

    Attributes:
        seconds: from the call of fetch until the last entry was delivered.
        bytes, requests: read from the drives.
    """

    seconds: float
    bytes: float
    requests: float


def settings(max_replicas: int) -> SwarmConfig:
    return SwarmConfig(
        paths=["unused"],
        clusterer="swarm",
        tau=0.6,
        max_replicas=max_replicas,
        selector="medoid",
        cold="packed",
    )


@functools.lru_cache(maxsize=8)  # cases that differ in the placement alone share them
def clustered(layer: LayerTrace, max_replicas: int) -> tuple[torch.Tensor, torch.Tensor, Index]:
    """Algorithm 1 on a recorded layer: offsets, members and their index."""
    config = settings(max_replicas)
    keys = layer.keys.float()
    bits = signatures(layer, config.profile_queries)
    offsets, members = clusterers.resolve(config.clusterer)(bits, keys, config)
    codes = coded(layer, config.profile_queries, config.code_size(keys.shape[2]), config.code_bits)
    medoids = Medoids.build(keys, offsets, members)
    return offsets, members, codes.laid_out(offsets, members, medoids)


def select(layer: LayerTrace, case: Case, steps: int) -> Layer:
    """The clusters of highest medoid score of a recorded layer's queries."""
    config = settings(case.max_replicas)
    offsets, members, index = clustered(layer, case.max_replicas)
    choose = selectors.resolve(config.selector)
    chosen = [
        choose(query[:, None], index, layer.settings.budget, config)
        for query in layer.queries()[: steps * case.rows]
    ]
    rows = [chosen[at : at + case.rows] for at in range(0, len(chosen), case.rows)]
    return Layer(layer.settings.entries, offsets, members, rows)


def fetched(drives: Drives, layers: Sequence[Layer], case: Case, strategy: str) -> Cost:
    """Read every step from the drives."""
    config = SwarmConfig(
        **drives.settings,
        dram_bytes="160MiB",
        staging_bytes="128MiB",
        placement=case.placement,
        router=strategy,
    )
    # The store measures its drives. What it plans by is how they compare, not how slow all are.
    with drives.following([model.slower(1 / OPENING) for model in drives.models]):
        store = Store(config)
    seconds = []
    for number, layer in enumerate(layers):
        half = torch.zeros(HEADS, layer.entries, DIM, dtype=torch.float16)
        with drives.unthrottled():
            segment = store.write(half, half, layer.offsets, layer.members, f"layer {number}")
        for step in layer.steps:
            wanted = [Wanted((segment,), *row, layer.entries) for row in step]
            begin = time.perf_counter()
            with store.fetch(wanted, purpose="stream") as fetch:
                fetch.complete()
            seconds.append(time.perf_counter() - begin)
        del wanted, segment
    traffic = store.counters()["stream"]
    store.close()
    count = len(seconds)
    return Cost(statistics.mean(seconds), traffic["bytes"] / count, traffic["requests"] / count)


def simulated(
    models: Sequence[DriveModel], layers: Sequence[Layer], case: Case, strategy: str
) -> Cost:
    """The same by the device model, without drives; only for single sequences."""
    parts = []
    for layer in layers:
        requests, size, seconds = simulate_selections(
            layer.offsets,
            layer.members,
            [step[0] for step in layer.steps],
            entries=layer.entries,
            entry_bytes=ENTRY_BYTES,
            drives=[(1 / model.iops, 1 / model.bytes_per_second) for model in models],
            placement=case.placement,
            router=strategy,
        )
        parts.append(torch.stack([seconds, size.sum(1).double(), requests.sum(1).double()], dim=1))
    return Cost(*torch.cat(parts).mean(0).tolist())


def costs(
    models: Sequence[DriveModel], layers: dict[Case, list[Layer]], report: Report
) -> Iterator[tuple[Case, str, Cost]]:
    """Of every case and strategy on these drives."""
    with checked_drives(models, DRIVE_BYTES, report) as drives:
        for case, own in layers.items():
            if not drives.throttled and case.rows > 1:
                continue
            for strategy in STRATEGIES:
                if drives.throttled:
                    yield case, strategy, fetched(drives, own, case, strategy)
                else:
                    yield case, strategy, simulated(models, own, case, strategy)


PAPER = (
    "latency 2.57 times and volume 1.24 times lower than Static, No Balance and No "
    "Deduplication, on average."
)
REMARK = (
    "on equal drives one sequence gains less than in the paper, because what is striped over "
    "drives balances by itself, and an ablation reads twice only what has copies; sequences "
    "that share a context, and drives that differ, gain more."
)


@dataclasses.dataclass(frozen=True)
class Parameters:
    contexts: tuple[int, ...] = (7424, 0)
    """Of `workload.RECORDINGS`, in their order; 0 leaves one out."""
    layers: int = 2
    """Of each recording, its last."""
    steps: int = 6
    """Test queries of each layer."""
    slowdown: float = 200.0
    """The drives deliver 1/`slowdown` of their rates."""
    sets: tuple[str, ...] = ("4 drives", "8 drives", "4 + 4 mixed")


QUICK = {"contexts": (1024, 0), "layers": 1, "steps": 2, "sets": ("4 drives", "4 + 4 mixed")}


def run(parameters: Parameters, report: Report) -> None:
    """Compare the strategies on recorded layers."""
    layers = [
        layer
        for (model, recording), context in zip(
            workload.RECORDINGS.items(), parameters.contexts, strict=True
        )
        if context
        for layer in workload.recorded(
            model,
            context=context,
            steps=16,
            stride=16,
            layers=recording.layers[-parameters.layers :],
        )
    ]
    compare(
        report, layers, slowdown=parameters.slowdown, steps=parameters.steps, sets=parameters.sets
    )


def compare(
    report: Report,
    layers: Sequence[LayerTrace],
    *,
    cases: Sequence[Case] = CASES,
    slowdown: float = 200,
    steps: int = 12,
    sets: Sequence[str] = Parameters.sets,
) -> None:
    """Compare the strategies on `sets` of drives, by `steps` test queries of each layer."""
    selected = {case: [select(layer, case, steps) for layer in layers] for case in cases}
    models = drive_sets(slowdown)
    for name in tqdm(sets, desc="fig14", disable=None):
        table: dict[Case, dict[str, Cost]] = {}
        for case, strategy, cost in costs(models[name], selected, report):
            table.setdefault(case, {})[strategy] = cost
        for case, by_strategy in table.items():
            summarise(f"{name}, {case.name}", by_strategy, report)
    report.note(
        "factors are a strategy's cost / swarm's on the same layout; steps select a "
        "tenth of the context by medoids and find nothing cached; entries of 4 KiB"
    )


def summarise(title: str, by_strategy: dict[str, Cost], report: Report) -> None:
    swarm = by_strategy["swarm"]
    for strategy, cost in by_strategy.items():
        report.measure(f"{title}, {strategy}: latency", "s", cost.seconds)
        report.measure(f"{title}, {strategy}: volume", "B", cost.bytes)
        report.measure(f"{title}, {strategy}: requests", "requests", cost.requests)
    latency = [by_strategy[each].seconds / swarm.seconds for each in ABLATIONS]
    volume = [by_strategy[each].bytes / swarm.bytes for each in ABLATIONS]
    report.at_least(f"{title}: latency, mean factor", statistics.mean(latency), PAPER_LATENCY)
    report.at_least(f"{title}: volume, mean factor", statistics.mean(volume), PAPER_VOLUME)
    report.at_least(f"{title}: latency, least factor", min(latency), 1.0)


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Latency and volume of each strategy."""
    name = r"(?P<x>[^,]+, (?:Algorithm 1|3 copies).*), (?P<series>\w+)"
    plots.draw(
        result,
        path,
        [
            plots.Panel(
                name + ": latency", "", "I/O latency per step (ms)", kind="bars", factor=1e3
            ),
            plots.Panel(name + ": volume", "", "read per step (MiB)", kind="bars", factor=2**-20),
        ],
        columns=1,
    )
