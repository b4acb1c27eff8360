"""Fig. 18 of the paper: throughput and bandwidth on one to eight drives.

A batch decodes one recorded layer: steps so large that a request's latency does not matter. Beside
what was achieved stands what the plan allows: reads are spread unevenly over the drives, and a step
ends when the busiest drive does.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from benchmarks import decoding, plots, workload
from benchmarks.drives import PM9A3, Drives, checked_drives
from benchmarks.harness import Report
from benchmarks.methods import METHODS, OURS

PAPER = (
    "Equal to the baselines on one drive, then faster with each further one; 37.67 GB/s on eight "
    "drives, which is 0.68 of eight PM9A3."
)
REMARK = (
    "Two things take their part of a step of a tenth: one drive delivers 0.95 of its bandwidth, as "
    "single entries are bound by requests; and the plan leaves the busiest of eight drives 4 % "
    "more than the mean. Steps that read more, and are bound by bandwidth, come closer."
)
SPEEDUP, SHARE = 7.0, 0.9
"""Goals for `swarm`: from one drive to eight, and of the bandwidth of all drives."""
LARGE: dict[str, dict[str, Any]] = {
    "large steps": {},
    "large steps in one round": {"staging_bytes": "512MiB", "dram_bytes": "4GiB"},
}
"""Settings of steps that read much; the first go through 128 MiB of staging memory."""
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
    steps: int = 4
    large: float = 0.3
    """Share of the context that a large step reads: long requests, bound by bandwidth alone."""
    drives: tuple[int, ...] = (1, 2, 4, 8)
    slowdown: float = 200.0
    """The drives deliver 1/`slowdown` of their rates."""
    cache: float = 0.0
    """Share of the entries that the cluster cache may hold."""


QUICK = {
    "model": "smollm2",
    "context": 1024,
    "layers": (10,),
    "batch": 2,
    "steps": 2,
    "drives": (1, 8),
}


def run(parameters: Parameters, report: Report) -> None:
    """Throughput, bandwidth and recall of every method on every number of drives."""
    layers = workload.recorded(
        parameters.model,
        parameters.text,
        context=parameters.context,
        steps=(parameters.steps + 1) * parameters.batch,
        layers=parameters.layers,
        entry_bytes=parameters.entry_bytes,
    )
    models = [PM9A3.slower(parameters.slowdown)] * max(parameters.drives)
    bar = tqdm(total=len(METHODS) * len(parameters.drives), desc="fig18", disable=None)
    with checked_drives(models, DRIVE_BYTES, report) as drives:
        for method, settings in METHODS.items():
            ready = [decoding.prefilled(layer, drives=len(models), **settings) for layer in layers]
            rates = {}
            found = None
            for count in parameters.drives:
                own = drives.first(count)
                found = decoding.costs(
                    ready,
                    own,
                    parameters.steps,
                    batch=parameters.batch,
                    cache=parameters.cache,
                    like=found,
                )
                share = measure(report, f"{method}, {count} drives", own, found)
                rates[count] = sum(1 / cost.seconds for cost in found)
                bar.update()
            if method == OURS:
                shares = {}
                for kind, memory in LARGE.items():
                    large = decoding.costs(
                        ready,
                        drives,
                        parameters.steps,
                        batch=parameters.batch,
                        sparsity=parameters.large,
                        **memory,
                    )
                    title = f"{method}, {kind}, {len(drives.models)} drives"
                    shares[kind] = measure(report, title, drives, large)
                check(report, rates, share, shares)
    report.note(
        f"batch of {parameters.batch}, context {parameters.context}; large steps read "
        f"{parameters.large:.0%} of it; a repetition is a layer; "
        f"cached: {parameters.cache:.0%} of the entries"
    )


def measure(report: Report, title: str, drives: Drives, found: Sequence[decoding.Cost]) -> float:
    """Tell what steps cost; returns the least share of the drives' bandwidth that was achieved."""
    together = sum(model.bytes_per_second for model in drives.models)
    decoding.measure(report, title, found)
    shares = [cost.bytes_per_second / together for cost in found]
    report.measure(f"{title}: achieved", "share of the drives' sum", shares)
    report.measure(
        f"{title}: allowed by the plan",
        "share of the drives' sum",
        [cost.bytes / together / cost.busiest for cost in found],
    )
    return min(shares)


def check(report: Report, rates: dict[int, float], share: float, large: dict[str, float]) -> None:
    """Whether our throughput scales.

    Args:
        report: is told.
        rates: throughput by number of drives.
        share: of the bandwidth of most drives that was achieved. large: the same of
            large steps, by kind.
    """
    fewest, most = min(rates), max(rates)
    report.at_least(
        f"{OURS}: throughput, {most} drives / {fewest}",
        rates[most] / rates[fewest],
        SPEEDUP * most / 8 / fewest,
    )
    title = f"{OURS}, {most} drives: achieved bandwidth, share of the drives' sum"
    report.at_least(title, share, SHARE)
    for kind, achieved in large.items():
        report.at_least(f"{title}, {kind}", achieved, SHARE)


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    name = r"(?P<series>[^,]+), (?P<x>\d+) drives"
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
