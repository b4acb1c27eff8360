"""Fig. 3 of the paper: few tokens hold most of the attention, and they change from step to step.

Recorded attention of real models, mean over heads, of the stored entries: those behind the sinks
and before the window, which are always in memory. What a step activates is the tenth of highest
attention.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

from benchmarks import plots, workload
from benchmarks.harness import Report
from swarm_kv.trace import LayerTrace

PAPER = (
    "Few tokens hold most of the attention, and which ones they are differs from token to token "
    "(no numbers in the text)."
)
REMARK = (
    "The best tenth of the stored entries holds 78 to 92 % of the attention on them. Sets of "
    "consecutive steps share 54 to 71 %, 28 to 47 % after 128 steps: they change, but stay far "
    "from independent (10 %), which is what a cache lives on."
)
SHUFFLE_SEED = 0


@dataclasses.dataclass(frozen=True)
class Parameters:
    models: tuple[str, ...] = ("smollm2", "gemma3")
    texts: tuple[str, ...] = workload.TEXTS
    context: int = 7424
    steps: int = 160
    """Consecutive decoding steps."""
    shares: tuple[float, ...] = (0.01, 0.02, 0.05, 0.10, 0.20, 0.30)
    """Of the stored entries, those of highest attention first."""
    distances: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    """Steps between two sets that are compared."""


QUICK = {
    "models": ("smollm2",),
    "context": 1024,
    "steps": 32,
    "distances": (1, 4, 16),
}


def mass(layer: LayerTrace, share: float) -> float:
    """Attention on the best `share` of the stored entries over that on all, mean over steps."""
    held = layer.exact.mass
    count = max(1, round(share * held.shape[1]))
    return float((held.topk(count, dim=1).values.sum(1) / held.sum(1)).mean())


def active(layer: LayerTrace) -> torch.Tensor:
    """bool [steps, entries]: the entries of highest attention."""
    sets = torch.zeros(len(layer.selections), layer.settings.entries, dtype=torch.bool)
    return sets.scatter_(1, layer.selections.long(), True)


def overlap(sets: torch.Tensor, distance: int) -> float:
    """Share of a step's set, bool [steps, entries], that the set `distance` steps later has too."""
    both = (sets[:-distance] & sets[distance:]).sum(1)
    return float((both / sets[:-distance].sum(1)).mean())


def run(parameters: Parameters, report: Report) -> None:
    """Mass of the strongest entries, and overlap of the activated sets."""
    for model in parameters.models:
        for text in parameters.texts:
            layers = workload.recorded(
                model, text, context=parameters.context, steps=parameters.steps
            )
            title = f"{workload.RECORDINGS[model].title}, {text}"
            for share in parameters.shares:
                report.measure(
                    f"{title}: attention on the best {share * 100:g} %",
                    "share",
                    [mass(layer, share) for layer in layers],
                )
            report.measure(
                f"{title}: attention on sinks and window",
                "share",
                [float(layer.exact.rest_mass.mean()) for layer in layers],
            )
            sets = [active(layer) for layer in layers]
            found = {
                distance: [overlap(own, distance) for own in sets]
                for distance in parameters.distances
            }
            for distance, values in found.items():
                report.measure(f"{title}: overlap after {distance} steps", "share", values)
            order = torch.randperm(
                parameters.steps, generator=torch.Generator().manual_seed(SHUFFLE_SEED)
            )
            shuffled = [overlap(own[order], 1) for own in sets]
            report.measure(f"{title}: overlap after 1 step, steps shuffled", "share", shuffled)
            report.at_least(
                f"{title}: least overlap after {parameters.distances[0]} steps / shuffled steps",
                min(
                    near / far
                    for near, far in zip(found[parameters.distances[0]], shuffled, strict=True)
                ),
                1.0,
            )
    report.note("a repetition is a layer; the overlap of independent sets is a tenth")


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    panels = [
        plots.Panel(
            r"(?P<series>.+): attention on the best (?P<x>[\d.]+) %",
            "entries of highest attention (%)",
            "attention on stored entries (share)",
            "(a) few entries hold most of the attention",
        ),
        plots.Panel(
            r"(?P<series>.+): overlap after (?P<x>\d+) steps",
            "distance (decoding steps)",
            "overlap of activated sets (share)",
            "(b) the activated set changes",
            log_x=True,
            level=(0.1, "independent sets"),
        ),
    ]
    plots.draw(result, path, panels)
