"""Fig. 16 of the paper: latency of a step's reads against the length of the context and the batch.

Drives in slow motion, so that latency weighs against bandwidth as on real ones. Up to 31K tokens
the contexts are recorded; the curves up to a million have synthetic keys of matching statistics.
Above 32K a context is made of stretches of 32K entries, each laid out on its own, that a step
selects a tenth of.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import decoding, plots, synthetic, workload
from benchmarks.drives import PM9A3, Drives, checked_drives
from benchmarks.harness import Report
from swarm_kv import trace
from swarm_kv.trace import LayerTrace

PAPER = "Flat while bound by requests, then linear in bytes; a larger batch gets there sooner."
REMARK = (
    "The same shape, with the knee at 2K to 4K instead of 32K: a step of a layer reads in "
    "hundreds of requests at once, which fill the drives' queues at short contexts."
)
KV_HEADS, DIM = 8, 128
"""4 KiB per entry in 16 bits."""
STRETCH = 32768
DRIVES = 4
DRIVE_BYTES = 2 << 30
"""Room for all; only what is written takes memory."""
CHECKED = (64 << 10, 256 << 10)
"""Sizes of requests that saturate drives in slow motion at the depth of the check."""
KNEE = 1.5
"""Latency over that of the shortest context from which on bandwidth counts."""
TOLERANCE = 0.15


@dataclasses.dataclass(frozen=True)
class Parameters:
    contexts: tuple[int, ...] = tuple(1 << power for power in range(10, 21, 2))
    batches: tuple[int, ...] = (1, 4, 8)
    entries: int = 1 << 20
    """Most of all rows together, for they take 4 KiB of memory each."""
    recorded: tuple[int, ...] = (1920, 7680, 31744)
    """Contexts of Gemma 3."""
    layer: int = 11
    steps: int = 4
    profile: int = 256
    """Queries that tell which entries are activated together."""
    slowdown: float = 50.0
    """The drives take `slowdown` times as long for everything."""
    seed: int = 0


QUICK = {
    "contexts": (1024, 4096, 16384),
    "batches": (1, 4),
    "entries": 1 << 14,
    "recorded": (),
    "steps": 2,
}


@dataclasses.dataclass(frozen=True)
class Point:
    """One length and batch."""

    context: int
    seconds: float
    bytes: float


def made(context: int, parameters: Parameters) -> LayerTrace:
    """A layer with synthetic keys, and as many test queries as stretches and steps ask for."""
    tests = parameters.steps + parameters.entries // STRETCH + 1
    tokens = context + workload.WINDOW + tests
    queries = min(tokens, parameters.profile + workload.WINDOW + tests)
    text = synthetic.context(
        tokens, queries, heads=KV_HEADS, kv_heads=KV_HEADS, dim=DIM, seed=parameters.seed
    )
    q = torch.zeros_like(text.keys)
    q[:, -queries:] = text.queries
    settings = trace.Settings(context, workload.WINDOW, workload.SINKS, stride=1)
    return trace.layer_trace(0, q, text.keys, text.keys, scale=text.scale, settings=settings)


def stretched(
    parameters: Parameters, drives: Drives
) -> Iterator[tuple[int, int, list[decoding.Cost]]]:
    """Batch, context and steps of all synthetic points."""
    for length in sorted({min(context, STRETCH) for context in parameters.contexts}):
        points = [
            (batch, context)
            for batch, context in itertools.product(parameters.batches, parameters.contexts)
            if min(context, STRETCH) == length and batch * context <= parameters.entries
        ]
        if not points:
            continue
        ready = decoding.prefilled(made(length, parameters), profile_queries=parameters.profile)
        rows = max(batch * context // length for batch, context in points)
        with decoding.decoding(ready, drives, batch=rows) as decoder:
            for batch, context in points:
                own = batch * context // length
                decoder.steps(1, judged=False, rows=own)
                yield batch, context, decoder.steps(parameters.steps, judged=False, rows=own)


def run(parameters: Parameters, report: Report) -> None:
    """Latency and volume at every length and batch."""
    models = [PM9A3.dilated(parameters.slowdown)] * DRIVES
    curves: dict[int, list[Point]] = {}
    with checked_drives(models, DRIVE_BYTES, report, checked=CHECKED) as drives:
        bar = tqdm(desc="fig16", disable=None)
        for batch, context, steps in stretched(parameters, drives):
            _measure(report, f"synthetic, batch {batch}, context {context}", steps)
            cost = decoding.mean(steps)
            curves.setdefault(batch, []).append(Point(context, cost.seconds, cost.bytes))
            bar.update()
        for context in parameters.recorded:
            (layer,) = workload.recorded(
                "gemma3",
                context=context,
                steps=parameters.steps + 1,
                layers=(parameters.layer,),
                entry_bytes=4 * KV_HEADS * DIM,
            )
            with decoding.decoding(layer, drives) as decoder:
                decoder.steps(1, judged=False)
                title = f"Gemma 3, recorded, batch 1, context {context}"
                _measure(report, title, decoder.steps(parameters.steps))
            bar.update()
    for batch, points in curves.items():
        check(report, f"batch {batch}", points)
    report.note(
        f"entries of 4 KiB, nothing cached; times are those of drives in 1/{parameters.slowdown:g} "
        f"slow motion; batch times context is at most {parameters.entries}; synthetic contexts "
        f"above {STRETCH} consist of stretches; a repetition is a step"
    )


def check(report: Report, title: str, points: list[Point]) -> None:
    """Where the knee is, and whether latency is linear in bytes from there on."""
    points = sorted(points, key=lambda point: point.context)
    bound = [point for point in points if point.seconds >= KNEE * points[0].seconds]
    if len(bound) < 3:
        report.note(f"{title}: too few contexts are bound by bandwidth to see a line")
        return
    report.measure(f"{title}: knee at a context of", "tokens", bound[0].context)
    first, last = bound[0], bound[-1]
    whole = (last.seconds - first.seconds) / (last.bytes - first.bytes)
    slopes = [
        (after.seconds - before.seconds) / (after.bytes - before.bytes)
        for before, after in itertools.pairwise(bound)
    ]
    report.at_most(
        f"{title}: seconds per further byte from the knee on, furthest from their mean",
        max(abs(slope / whole - 1) for slope in slopes),
        TOLERANCE,
    )


def _measure(report: Report, title: str, steps: list[decoding.Cost]) -> None:
    report.measure(f"{title}: fetch", "s", [step.seconds for step in steps])
    report.measure(f"{title}: read", "B", [step.bytes for step in steps])


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    name = r"(?P<series>.+, batch \d+), context (?P<x>\d+)"
    panels = [
        plots.Panel(
            f"{name}: fetch",
            "context (tokens)",
            "I/O latency per step of a layer (ms)",
            factor=1e3,
            log_x=True,
            log_y=True,
        ),
        plots.Panel(
            f"{name}: read",
            "context (tokens)",
            "read per step of a layer (MB)",
            factor=1e-6,
            log_x=True,
            log_y=True,
        ),
    ]
    plots.draw(result, path, panels)
