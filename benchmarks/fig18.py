"""Fig. 18 of the paper: throughput and bandwidth on one to eight drives.

A batch decodes one recorded layer: steps so large that a request's latency does not matter. Beside
what was achieved stands what the plan allows: reads are spread unevenly over the drives, and a step
ends when the busiest drive does.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from tqdm import tqdm

from benchmarks import decoding, plots, workload
from benchmarks.drives import PM9A3, checked_drives
from benchmarks.harness import Report
from benchmarks.methods import METHODS

PAPER = (
    "Equal to the baselines on one drive, then faster with each further one; 37.67 GB/s on eight "
    "drives, which is 0.68 of eight PM9A3."
)
SPEEDUP, SHARE = 7.0, 0.9
"""Goals for `swarm`: from one drive to eight, and of the bandwidth of all drives."""
DRIVE_BYTES = 1 << 30
"""Room for a batch; only what is written takes memory."""


@dataclasses.dataclass(frozen=True)
class Parameters:
    model: str = "gemma3"
    text: str = "topics"
    context: int = 31744
    layers: tuple[int, ...] = (11,)
    entry_bytes: int = 4096
    batch: int = 4
    steps: int = 6
    drives: tuple[int, ...] = (1, 2, 4, 8)
    slowdown: float = 200.0
    """The drives deliver 1/`slowdown` of their rates."""
    cache: float = 0.0
    """Share of the entries that the cluster cache may hold."""


QUICK = {
    "model": "smollm2",
    "context": 2048,
    "layers": (10,),
    "batch": 2,
    "steps": 3,
    "drives": (1, 4, 8),
}


def run(parameters: Parameters, report: Report) -> None:
    """Throughput, bandwidth and recall of every method on every number of drives."""
    layers = [
        workload.widened(layer, parameters.entry_bytes)
        for layer in workload.recorded(
            parameters.model,
            parameters.text,
            context=parameters.context,
            steps=(parameters.steps + 1) * parameters.batch,
            layers=parameters.layers,
        )
    ]
    models = [PM9A3.slower(parameters.slowdown)] * max(parameters.drives)
    bar = tqdm(total=len(METHODS) * len(parameters.drives), desc="fig18", disable=None)
    with checked_drives(models, DRIVE_BYTES, report) as drives:
        for method, settings in METHODS.items():
            ready = [decoding.prefilled(layer, drives=len(models), **settings) for layer in layers]
            rates, shares = {}, {}
            for count in parameters.drives:
                own = drives.first(count)
                found = decoding.costs(
                    ready, own, parameters.steps, batch=parameters.batch, cache=parameters.cache
                )
                together = sum(model.bytes_per_second for model in own.models)
                title = f"{method}, {count} drives"
                decoding.measure(report, title, found)
                shares[count] = [cost.bytes_per_second / together for cost in found]
                report.measure(f"{title}: achieved", "share of the drives' sum", shares[count])
                report.measure(
                    f"{title}: allowed by the plan",
                    "share of the drives' sum",
                    [cost.bytes / together / cost.busiest for cost in found],
                )
                rates[count] = sum(1 / cost.seconds for cost in found)
                bar.update()
            if method == "swarm":
                check(report, rates, shares)
    report.note(
        f"batch of {parameters.batch}, context {parameters.context}; a repetition is a layer; "
        f"cached: {parameters.cache:.0%} of the entries"
    )


def check(report: Report, rates: dict[int, float], shares: dict[int, list[float]]) -> None:
    """Whether `swarm` scales, given its throughput and achieved shares by number of drives."""
    fewest, most = min(rates), max(rates)
    report.at_least(
        f"swarm: throughput, {most} drives / {fewest}",
        rates[most] / rates[fewest],
        SPEEDUP * most / 8 / fewest,
    )
    for count, achieved in shares.items():
        report.at_least(
            f"swarm, {count} drives: achieved bandwidth, share of the drives' sum",
            min(achieved),
            SHARE,
        )


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    name = r"(?P<series>.+), (?P<x>\d+) drives"
    panels = [
        plots.Panel(f"{name}: throughput", "drives", "steps of a layer per second"),
        plots.Panel(
            f"{name}: achieved",
            "drives",
            "achieved bandwidth (share of the drives' sum)",
            level=(SHARE, "goal"),
        ),
        plots.Panel(
            f"{name}: allowed by the plan",
            "drives",
            "share of the drives' sum that the plan allows",
        ),
        plots.Panel(f"{name}: recall", "drives", "recall (attention mass)"),
    ]
    plots.draw(result, path, panels)
