"""Fig. 19 of the paper: how much depends on the radius of Algorithm 1, and on data that shifts.

Three data sets: prose, code, and a context of prose that is asked by code which follows it. The
last is clustered by what the prose activates, and read by what code does.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from tqdm import tqdm

from benchmarks import decoding, plots, workload
from benchmarks.drives import PM9A3, checked_drives
from benchmarks.harness import Report
from swarm_kv.errors import ArgumentError

PAPER = (
    "Throughput stays effective over the radius and when the data set shifts (no numbers in the "
    "text)."
)
REMARK = (
    "Within 12 % from 0.3 to 0.9, and no worse on shifted data: the default selector does not "
    "depend on clusters to find entries. Smaller radii are a little faster, as copies spread "
    "neighbours."
)
DATA = {"prose": ("topics", None), "code": ("stdlib", None), "shifted": ("topics", "stdlib")}
"""Text of the context, and of what follows it if that is another one."""
DRIVES = 4
DRIVE_BYTES = 192 << 20
LEAST = 0.8
"""Throughput of the worst radius over that of the best."""


@dataclasses.dataclass(frozen=True)
class Parameters:
    model: str = "smollm2"
    context: int = 7424
    layers: tuple[int, ...] = (10,)
    entry_bytes: int = 4096
    taus: tuple[float, ...] = (0.3, 0.5, 0.7, 0.9)
    selector: str = "interval"
    """The default; the paper's is `medoid`."""
    steps: int = 12
    stride: int = 8
    """Tokens from one test query to the next."""
    slowdown: float = 200.0
    """The drives deliver 1/`slowdown` of their rates."""
    cache: float = 0.0
    """Share of the entries that the cluster cache may hold."""


QUICK = {"context": 1024, "taus": (0.3, 0.7), "steps": 2}


def run(parameters: Parameters, report: Report) -> None:
    """Throughput, recall and copies per entry at every radius."""
    models = [PM9A3.slower(parameters.slowdown)] * DRIVES
    bar = tqdm(total=len(DATA) * len(parameters.taus), desc="fig19", disable=None)
    with checked_drives(models, DRIVE_BYTES, report) as drives:
        for title, (text, follows) in DATA.items():
            layers = workload.recorded(
                parameters.model,
                text,
                context=parameters.context,
                steps=parameters.steps + 1,
                stride=parameters.stride,
                layers=parameters.layers,
                follows=follows,
                entry_bytes=parameters.entry_bytes,
            )
            rates = {}
            for tau in parameters.taus:
                bar.update()
                name = f"{title}, radius {tau:g}"
                try:
                    ready = [
                        decoding.prefilled(
                            layer,
                            clusterer="swarm",
                            layout="clusters",
                            tau=tau,
                            selector=parameters.selector,
                        )
                        for layer in layers
                    ]
                except ArgumentError as error:
                    report.note(f"{name}: left out, {error}")
                    continue
                found = decoding.costs(ready, drives, parameters.steps, cache=parameters.cache)
                decoding.measure(report, name, found)
                copies = [one.copies for one in ready]
                report.measure(f"{name}: copies", "copies per entry", copies)
                rates[tau] = sum(1 / cost.seconds for cost in found)
            report.at_least(
                f"{title}: throughput, worst radius / best",
                min(rates.values()) / max(rates.values()),
                LEAST,
            )
    report.note(
        f"Algorithm 1, {parameters.selector} selector; a repetition is a layer; cached: "
        f"{parameters.cache:.0%} of the entries"
    )


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    name = r"(?P<series>.+), radius (?P<x>[\d.]+)"
    panels = [
        plots.Panel(f"{name}: throughput", "radius τ", "steps of a layer per second"),
        plots.Panel(f"{name}: recall", "radius τ", "recall (attention mass)"),
        plots.Panel(f"{name}: copies", "radius τ", "stored copies per entry"),
    ]
    plots.draw(result, path, panels)
