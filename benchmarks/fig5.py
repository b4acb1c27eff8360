"""Fig. 5 of the paper: why groups that overlap are hard to place, to read and to keep.

(a) Without a cap on copies, Algorithm 1 puts some entries into many groups. (b) The same placement
delivers more or less of the drives' bandwidth, by which copy of each entry is read. (c) Groups that
take in new entries by size or by similarity are activated together less and less.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import decoding, plots, table5, workload
from benchmarks.drives import PM9A3, checked_drives
from benchmarks.harness import Report
from swarm_kv import SwarmConfig, clusterers
from swarm_kv.index import members_of
from swarm_kv.trace import LayerTrace
from swarm_kv.tune import signatures

PAPER = (
    "(a) Some entries are in more than 20 groups. (b) Bandwidth differs by the path through the "
    "replicas, (c) updates by size or similarity lower the co-activation probability (no numbers "
    "in the text)."
)
REMARK = (
    "(a) Up to 116 groups, 4 to 6 % of the entries in more than 20. (b) By the plan, 38 % of the "
    "drives' sum on the worst path, 67 % by first copies, 96 % as the default router balances "
    "them. (c) Growth by size loses what belongs together; growth by similarity of keys does not,"
    " unlike in the paper: neighbours in the text have similar keys and are wanted together."
)
MANY = 20
"""Groups."""
UNCAPPED = 255
DRIVES = 4
DRIVE_BYTES = 192 << 20
ROUTERS = ("swarm", "dedup_only")
"""Which copy is read: balanced, or the first."""
UPDATES = ("min_size", "min_diff", "swarm")


@dataclasses.dataclass(frozen=True)
class Parameters:
    model: str = "smollm2"
    text: str = "topics"
    context: int = 7424
    layers: tuple[int, ...] = (10,)
    taus: tuple[float, ...] = (0.45, 0.6, 0.75)
    entry_bytes: int = 4096
    steps: int = 16
    paths: int = 64
    """Ways to choose copies at random that each step is reckoned with."""
    slowdown: float = 200.0
    """The drives deliver 1/`slowdown` of their rates."""
    update_context: int = 5632
    update_layers: tuple[int, ...] = (10,)
    updates: int = 128
    """Tokens that leave the window."""
    seed: int = 0


QUICK = {
    "context": 1024,
    "taus": (0.45, 0.6),
    "steps": 2,
    "update_context": 1024,
    "updates": 32,
}


def groups_per_entry(layer: LayerTrace, tau: float) -> torch.Tensor:
    """int64 [entries that are in any]: groups of Algorithm 1 without a cap on copies."""
    config = SwarmConfig(
        paths=["unused"], clusterer="swarm", tau=tau, max_replicas=UNCAPPED, cold="coded"
    )
    lists = clusterers.resolve("swarm")(signatures(layer), layer.keys.float(), config)
    offsets, members = lists
    counts = torch.bincount(members[: int(offsets[-1])].long(), minlength=layer.settings.entries)
    return counts[counts > 0]


@dataclasses.dataclass(frozen=True)
class Paths:
    """Bandwidth of ways to choose copies, as share of the drives' sum: mean over steps.

    Attributes:
        worst: of any way: one drive delivers all that it can.
        least, median, most: of ways drawn at random.
    """

    worst: float
    least: float
    median: float
    most: float


def paths(held: Sequence[torch.Tensor], count: int, random: torch.Generator) -> Paths:
    """Args:
    held: per step, bool [entries, drives]: which drives hold each entry that is read.
    count: ways to draw.
    """
    rows = []
    for drives in held:
        entries, width = drives.shape
        odds = drives.double() / drives.sum(1, keepdim=True)
        drawn = torch.multinomial(odds, count, replacement=True, generator=random)
        loads = torch.zeros(count, width).scatter_add_(1, drawn.T, torch.ones(count, entries))
        shares = (entries / width / loads.max(1).values).sort().values
        worst = entries / width / float(drives.sum(0).max())
        rows.append([worst, *(float(shares[at]) for at in (0, count // 2, -1))])
    return Paths(*(statistics.mean(column) for column in zip(*rows, strict=True)))


def held(decoder: decoding.Decoder, steps: int) -> list[torch.Tensor]:
    """Of the entries that each step selects, which drives hold them; see `paths`."""
    index, segment = decoder.index, decoder.segments[0]
    drives = decoder.store.drives_of(segment).long()
    table = torch.zeros(index.entries, len(decoder.models), dtype=torch.bool)
    table[index.members.long(), drives] = True
    return [
        table[
            members_of(
                index.offsets, index.members, *decoder.select(int(token), decoder.config.sparsity)
            )
        ]
        for token in decoder.layer.positions[:steps]
    ]


def run(parameters: Parameters, report: Report) -> None:
    """All three parts."""
    layers = workload.recorded(
        parameters.model,
        parameters.text,
        context=parameters.context,
        steps=parameters.steps + 1,
        layers=parameters.layers,
    )
    overlapping(layers, parameters, report)
    routed(layers, parameters, report)
    updated(parameters, report)


def overlapping(layers: Sequence[LayerTrace], parameters: Parameters, report: Report) -> None:
    """(a)"""
    most = 0
    for tau in parameters.taus:
        counts = [groups_per_entry(layer, tau) for layer in layers]
        title = f"(a) radius {tau:g}"
        report.measure(f"{title}: mean", "groups", [float(c.float().mean()) for c in counts])
        report.measure(f"{title}: most", "groups", [int(c.max()) for c in counts])
        report.measure(
            f"{title}: entries in more than {MANY}",
            "share",
            [float((c > MANY).float().mean()) for c in counts],
        )
        most = max(most, *(int(c.max()) for c in counts))
    report.at_least("(a) most groups of an entry", most, MANY + 1)


def routed(layers: Sequence[LayerTrace], parameters: Parameters, report: Report) -> None:
    """(b)"""
    random = torch.Generator().manual_seed(parameters.seed)
    models = [PM9A3.slower(parameters.slowdown)] * DRIVES
    ready = [
        decoding.prefilled(
            workload.widened(layer, parameters.entry_bytes),
            clusterer="swarm",
            layout="clusters",
            tau=max(tau for tau in parameters.taus if tau <= 0.6),
            selector="medoid",
        )
        for layer in layers
    ]
    reckoned = []
    with checked_drives(models, DRIVE_BYTES, report) as drives:
        for one in ready:
            with decoding.decoding(one, drives) as decoder:
                reckoned.append(paths(held(decoder, parameters.steps), parameters.paths, random))
        for router in ROUTERS:
            found = decoding.costs(ready, drives, parameters.steps, router=router)
            decoding.measure(report, f"(b) router {router}", found)
            together = sum(model.bytes_per_second for model in drives.models)
            report.measure(
                f"(b) plan of {router}",
                "share of the drives' sum",
                [cost.bytes / together / cost.busiest for cost in found],
            )
    titles = {
        "worst": "worst path",
        "least": "worst random path",
        "median": "median random path",
        "most": "best random path",
    }
    for field, title in titles.items():
        report.measure(
            f"(b) plan of {title}",
            "share of the drives' sum",
            [getattr(row, field) for row in reckoned],
        )
    report.at_least(
        "(b) bandwidth by the plan, best random path / worst path",
        statistics.mean(row.most for row in reckoned)
        / statistics.mean(row.worst for row in reckoned),
        1.2,
    )


def together(active: torch.Tensor, entries: torch.Tensor, medoids: torch.Tensor) -> float:
    """Mean probability that an entry and its medoid are activated by a query that activates one of
    them; 0 where there are no pairs."""
    return 1 - table5.distance(active, entries, medoids) if len(entries) else 0.0


def at_start(groups: table5.Grouped) -> float:
    entries, medoids = groups.pairs[0]
    others = entries != medoids
    return together(groups.later, entries[others], medoids[others])


def updated(parameters: Parameters, report: Report) -> None:
    """(c)"""
    steps = parameters.updates
    layers = workload.recorded(
        parameters.model,
        parameters.text,
        context=parameters.update_context,
        steps=table5.LATER + steps + workload.WINDOW,
        layers=parameters.update_layers,
    )
    times = tuple(t for t in (1, 2, 4, 8, 16, 32, 64, 128, 256) if t <= steps)
    last: dict[str, float] = {}
    for strategy in tqdm(UPDATES, desc="fig5 (c)", disable=None):
        found = [
            table5.grouped(layer, parameters.update_context, steps, times, strategy)
            for layer in layers
        ]
        for step in sorted({*times, steps}):
            values = []
            for one in found:
                entries, medoids = one.pairs[step]
                new = (entries >= one.before) & (entries != medoids)
                values.append(together(one.later, entries[new], medoids[new]))
            report.measure(
                f"(c) {strategy}: co-activation of new entries and their medoids after {step} "
                "tokens",
                "probability",
                values,
            )
            last[strategy] = statistics.mean(values)
        report.measure(
            f"(c) {strategy}: co-activation of entries and medoids at the start",
            "probability",
            [at_start(one) for one in found],
        )
    for naive in UPDATES[:2]:
        report.at_least(
            f"(c) co-activation of new entries, swarm / {naive}",
            last["swarm"] / max(last[naive], 1e-9),
            1.0,
        )


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    panels = [
        plots.Panel(
            r"\(a\) radius (?P<x>[\d.]+): (?P<series>mean|most)",
            "radius τ",
            "groups per entry",
            "(a) groups overlap",
            log_y=True,
            level=(MANY, "20 groups"),
        ),
        plots.Panel(
            r"\(b\) plan of (?P<x>.+)",
            "copy that is read",
            "bandwidth by the plan (share)",
            "(b) paths through the replicas",
            kind="bars",
        ),
        plots.Panel(
            r"\(c\) (?P<series>.+): co-activation of new .* after (?P<x>\d+) tokens",
            "tokens that left the window",
            "co-activation with the medoid",
            "(c) updates",
            log_x=True,
        ),
    ]
    plots.draw(result, path, panels, columns=3)
