"""Fig. 17 of the paper: throughput against the length of the context, on two kinds of drives.

Recorded layers of real models, one fetch per layer and step; drives in slow motion, equally slow
for both kinds, so that latency weighs against bandwidth as on the real ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from benchmarks import decoding, plots, workload
from benchmarks.drives import OPTANE_900P, PM9A3, Drives, checked_drives
from benchmarks.harness import Report
from benchmarks.methods import METHODS, OURS

PAPER = (
    "SWARM is best everywhere; the knee from latency to bandwidth lies near 32K on four 900P and "
    "near 64K on four PM9A3."
)
REMARK = (
    "Ahead of all from 15K on, by 15 to 20 % on PM9A3 and a few percent on 900P, which serve "
    "small reads better for their bandwidth; below, steps are so small that an uneven plan costs "
    "what fewer requests save. InfLLM and PQCache read as much, and their recall is far lower at "
    "length."
)
KINDS = {"4 x PM9A3": PM9A3, "4 x 900P": OPTANE_900P}
DRIVES = 4
CHECKED = (64 << 10, 256 << 10)
"""Sizes of requests that saturate drives in slow motion at the depth of the check."""
DRIVE_BYTES = 128 << 20


@dataclasses.dataclass(frozen=True)
class Parameters:
    smollm2: tuple[int, ...] = (1024, 4096, 7424)
    """Contexts of SmolLM2."""
    gemma3: tuple[int, ...] = (15872, 31744)
    """Contexts of Gemma 3."""
    layers: tuple[int, int] = (10, 11)
    """One of each model."""
    entry_bytes: int = 4096
    steps: int = 12
    slowdown: float = 200.0
    """The drives take `slowdown` times as long for everything."""
    cache: float = 0.0
    """Share of the entries that the cluster cache may hold."""


QUICK = {"smollm2": (1024,), "gemma3": (), "steps": 2}


def run(parameters: Parameters, report: Report) -> None:
    """Throughput and recall of every method at every length, on both kinds of drives."""
    cases = [
        (model, layer, context)
        for model, layer, contexts in zip(
            ("smollm2", "gemma3"),
            parameters.layers,
            (parameters.smollm2, parameters.gemma3),
            strict=True,
        )
        for context in contexts
    ]
    models = [PM9A3.dilated(parameters.slowdown)] * DRIVES
    gains: dict[str, list[float]] = {}
    with checked_drives(models, DRIVE_BYTES, report, checked=CHECKED) as drives:
        for model, number, context in tqdm(cases, desc="fig17", disable=None):
            (layer,) = workload.recorded(
                model,
                context=context,
                steps=parameters.steps + 1,
                layers=(number,),
                entry_bytes=parameters.entry_bytes,
            )
            ready = {
                method: [decoding.prefilled(layer, **settings)]
                for method, settings in METHODS.items()
            }
            known: dict[str, list[decoding.Cost]] = {}
            for kind, own in _kinds(drives, parameters.slowdown):
                seconds = {}
                with own as followed:
                    for method, layers in ready.items():
                        found = known[method] = decoding.costs(
                            layers,
                            followed,
                            parameters.steps,
                            cache=parameters.cache,
                            like=known.get(method),
                        )
                        decoding.measure(report, f"{kind}, {method}, context {context}", found)
                        seconds[method] = found[0].seconds
                swarm = seconds.pop(OURS)
                gains.setdefault(kind, []).append(min(seconds.values()) / swarm)
    for kind, factors in gains.items():
        report.at_least(
            f"{kind}: throughput, swarm / best baseline, least over contexts", min(factors), 1.0
        )
    report.note(
        f"one layer of a model, entries of {parameters.entry_bytes} bytes; SmolLM2 up to "
        f"{max(parameters.smollm2, default=0)} tokens, Gemma 3 above; times are those of drives in "
        f"slow motion; cached: {parameters.cache:.0%} of the entries"
    )


def _kinds(
    drives: Drives, slowdown: float
) -> Iterator[tuple[str, contextlib.AbstractContextManager[Drives]]]:
    """The same drives as each kind; real ones as what they are."""
    if drives.kind == "real":
        yield f"{DRIVES} drives", contextlib.nullcontext(drives)
        return
    for kind, model in KINDS.items():
        yield kind, drives.following([model.dilated(slowdown)] * DRIVES)


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    kinds = dict.fromkeys(m["name"].split(",")[0] for m in result["measurements"])
    panels = [
        plots.Panel(
            rf"{kind}, (?P<series>.+), context (?P<x>\d+): {quantity}",
            "context (tokens)",
            label,
            kind,
            log_x=True,
            log_y=quantity == "throughput",
        )
        for quantity, label in (
            ("throughput", "steps of a layer per second"),
            ("recall", "recall (attention mass)"),
        )
        for kind in kinds
    ]
    plots.draw(result, path, panels)
