"""Fig. 20 of the paper: throughput against the share of the context that a step reads."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from tqdm import tqdm

from benchmarks import decoding, plots, workload
from benchmarks.drives import PM9A3, checked_drives
from benchmarks.harness import Report
from benchmarks.methods import METHODS, OURS

PAPER = "SWARM is ahead at every sparsity ratio, be it bound by requests or by bandwidth."
REMARK = (
    "Ahead up to 20 %, most at 3 % (by 20 %), where requests count, at lower recall than No "
    "Cluster there; at 20 to 30 % everything reads at the drives' bandwidth, and all are within "
    "2 %. "
    "Nothing is cached here: the paper's factors include its DRAM tier."
)
DRIVES = 4
DRIVE_BYTES = 128 << 20


@dataclasses.dataclass(frozen=True)
class Parameters(workload.Decoded):
    layers: tuple[int, ...] = (10,)
    sparsities: tuple[float, ...] = (0.01, 0.03, 0.10, 0.20, 0.30)
    """Share of the context that a step reads; contexts are profiled with it, too."""


QUICK = {"context": 1024, "sparsities": (0.10, 0.30), "steps": 2}


def run(parameters: Parameters, report: Report) -> None:
    """Throughput and recall of every method at every sparsity."""
    layers = parameters.traces()
    models = [PM9A3.slower(parameters.slowdown)] * DRIVES
    gains = {}
    with checked_drives(models, DRIVE_BYTES, report) as drives:
        for sparsity in tqdm(parameters.sparsities, desc="fig20", disable=None):
            rates = {}
            for method, settings in METHODS.items():
                ready = [
                    decoding.prefilled(layer, **settings, sparsity=sparsity) for layer in layers
                ]
                found = decoding.costs(ready, drives, parameters.steps, cache=parameters.cache)
                decoding.measure(report, f"{method}, sparsity {sparsity * 100:g} %", found)
                rates[method] = sum(1 / cost.seconds for cost in found)
            swarm = rates.pop(OURS)
            gains[sparsity] = swarm / max(rates.values())
    for sparsity, gain in gains.items():
        report.at_least(f"{sparsity:.0%}: throughput, swarm / best baseline", gain, 1.0)
    report.note(
        f"context {parameters.context}; a repetition is a layer; cached: {parameters.cache:.0%} of "
        "the entries"
    )


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    name = r"(?P<series>.+), sparsity (?P<x>[\d.]+) %"
    panels = [
        plots.Panel(
            f"{name}: throughput",
            "sparsity (% of the context)",
            "steps of a layer per second",
            log_y=True,
        ),
        plots.Panel(f"{name}: recall", "sparsity (% of the context)", "recall (attention mass)"),
    ]
    plots.draw(result, path, panels)
