"""Fig. 13 of the paper: what the placement on several drives does to latency and bandwidth.

The same clusters of recorded layers, placed in each way, and what No Cluster reads in token order.
"""

from __future__ import annotations

import dataclasses
import os
import re
import statistics
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from benchmarks import decoding, plots, workload
from benchmarks.drives import checked_drives, drive_sets
from benchmarks.harness import Report
from benchmarks.methods import METHODS

PAPER = (
    "Round robin over all drives (Eq. 7) has up to 2.63 times lower I/O latency than No Cluster "
    "in sequential order, and up to 3.17 times lower than a fixed first drive."
)
REMARK = (
    "Far less: reads of a step are balanced over copies and joined before they are sent, so that "
    "a bad placement is mostly made good, and No Cluster here deals its entries to all drives. "
    "What placement decides is mixed drives, where weights save a third."
)
PLACEMENTS = ("sequential", "fixed_start", "round_robin", "weighted")
WAYS: dict[str, dict[str, Any]] = {
    "default clusters": {"layout": "clusters"},
    "Algorithm 1, medoids": {"layout": "clusters", "clusterer": "swarm", "selector": "medoid"},
}
"""What is placed: the default clusterer and selector, and the paper's."""
BASELINE = "No Cluster"
GOALS = {BASELINE: 2.63, "fixed_start": 3.17}
"""Latency over that of the best placement of the same clusters, on the drives where it is most."""
DRIVE_BYTES = 128 << 20


@dataclasses.dataclass(frozen=True)
class Parameters(workload.Decoded):
    sets: tuple[str, ...] = ("4 drives", "8 drives", "4 + 4 mixed")


QUICK = {"context": 1024, "layers": (10,), "steps": 2, "sets": ("4 + 4 mixed",)}


def run(parameters: Parameters, report: Report) -> None:
    """Latency and bandwidth of every placement on every set of drives."""
    layers = parameters.traces()
    ready = {
        way: [decoding.prefilled(layer, **settings) for layer in layers]
        for way, settings in {**WAYS, BASELINE: METHODS["No Cluster"]}.items()
    }
    known: dict[str, list[decoding.Cost]] = {}
    gains: dict[tuple[str, str], list[float]] = {}
    for name in tqdm(parameters.sets, desc="fig13", disable=None):
        models = drive_sets(parameters.slowdown)[name]
        with checked_drives(models, DRIVE_BYTES, report) as drives:

            def cost(
                way: str, placement: str, set_name: str = name, drives: Any = drives
            ) -> list[float]:
                found = known[way] = decoding.costs(
                    ready[way],
                    drives,
                    parameters.steps,
                    cache=parameters.cache,
                    like=known.get(way),
                    placement=placement,
                )
                _measure(report, f"{set_name}; {way}, {placement}", found)
                return [one.seconds for one in found]

            plain = cost(BASELINE, "sequential")
            for way in WAYS:
                seconds = {placement: cost(way, placement) for placement in PLACEMENTS}
                best = min(seconds.values(), key=statistics.mean)
                for against, slow in ((BASELINE, plain), ("fixed_start", seconds["fixed_start"])):
                    gains.setdefault((way, against), []).append(
                        statistics.mean(slow) / statistics.mean(best)
                    )
    for (way, against), factors in gains.items():
        report.at_least(
            f"{way}: latency, {against} / best placement, up to", max(factors), GOALS[against]
        )
    report.note(f"a repetition is a layer; cached: {parameters.cache:.0%} of the entries")


def _measure(report: Report, title: str, found: Sequence[decoding.Cost]) -> None:
    decoding.measure(report, title, found)
    report.measure(f"{title}: busiest drive by the plan", "s", [cost.busiest for cost in found])


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    panels = [
        plots.Panel(
            rf"{re.escape(name)}; (?P<series>.+), (?P<x>\w+): {quantity}",
            "placement",
            label,
            name,
            kind="bars",
            factor=factor,
        )
        for name in result["parameters"]["sets"]
        for quantity, label, factor in (
            ("fetch", "I/O latency per step (ms)", 1e3),
            ("bandwidth", "aggregate bandwidth (MB/s)", 1e-6),
        )
    ]
    plots.draw(result, path, panels)
