"""Fig. 12 of the paper: what the way of clustering does to the latency of a step's reads.

Recorded layers, clustered in each way and always read by clusters; every step selects equally many
entries. With the paper's selector, by medoids, and with the default one, by codes.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from typing import Any

from tqdm import tqdm

from benchmarks import decoding, plots, workload
from benchmarks.drives import PM9A3, checked_drives
from benchmarks.harness import Report

PAPER = (
    "Algorithm 1 has 1.14 times lower latency than Medoid Only and 1.33 times lower than No "
    "Replica."
)
REMARK = (
    "With the paper's selector about as far ahead of both; without copies recall falls too, from "
    "0.84 to 0.75. With the default selector, which reads what it wants from any layout, recall "
    "is the same everywhere and the clusterers are 3 to 19 % apart: most of the paper's gain is "
    "in selection."
)
CLUSTERERS = ("swarm", "medoid_only", "no_replica", "hypergraph")
"""`hypergraph` is ours, and the default."""
SELECTORS = ("medoid", "interval")
GOALS = {"medoid_only": 1.14, "no_replica": 1.33}
"""Latency over that of `swarm`."""
DRIVES = 4
DRIVE_BYTES = 128 << 20


@dataclasses.dataclass(frozen=True)
class Parameters(workload.Decoded):
    tau: float = 0.6


QUICK = {"context": 1024, "layers": (10,), "steps": 2}


def run(parameters: Parameters, report: Report) -> None:
    """Latency and recall of each clusterer, by each selector."""
    layers = parameters.traces()
    models = [PM9A3.slower(parameters.slowdown)] * DRIVES
    bar = tqdm(total=len(SELECTORS) * len(CLUSTERERS), desc="fig12", disable=None)
    with checked_drives(models, DRIVE_BYTES, report) as drives:
        for selector in SELECTORS:
            seconds: dict[str, list[float]] = {}
            for clusterer in CLUSTERERS:
                ready = [
                    decoding.prefilled(
                        layer,
                        selector=selector,
                        clusterer=clusterer,
                        layout="clusters",
                        tau=parameters.tau,
                    )
                    for layer in layers
                ]
                found = decoding.costs(ready, drives, parameters.steps, cache=parameters.cache)
                decoding.measure(report, f"{selector} selector, {clusterer}", found)
                seconds[clusterer] = [cost.seconds for cost in found]
                bar.update()
            for clusterer, goal in GOALS.items():
                report.at_least(
                    f"{selector} selector: latency, {clusterer} / swarm",
                    statistics.geometric_mean(
                        own / swarm
                        for own, swarm in zip(seconds[clusterer], seconds["swarm"], strict=True)
                    ),
                    goal,
                )
    report.note(
        f"radius {parameters.tau:g}, at most 3 copies of an entry; a repetition is a layer; "
        f"cached: {parameters.cache:.0%} of the entries"
    )


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    name = r"(?P<series>.+ selector), (?P<x>\w+)"
    panels = [
        plots.Panel(
            f"{name}: fetch", "clusterer", "I/O latency per step (ms)", kind="bars", factor=1e3
        ),
        plots.Panel(f"{name}: recall", "clusterer", "recall (attention mass)", kind="bars"),
    ]
    plots.draw(result, path, panels)
