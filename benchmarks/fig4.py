"""Fig. 4 of the paper: entries are activated together far more often than chance would have it.

For pairs of stored entries, how often one is activated by a query that activates the other,
P(j | i), over the last queries of a recorded context. Chance keeps how often each entry is
activated, but deals its activations to queries at random.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import plots, workload
from benchmarks.harness import Report
from swarm_kv.trace import LayerTrace
from swarm_kv.tune import signatures

PAPER = (
    "Entries are activated in groups, across models and data (a picture; no numbers in the text)."
)
REMARK = (
    "An entry's closest partner is activated with it 3.4 to 3.9 times as often (Jaccard "
    "similarity) as by chance, on both models and texts. Averages over all pairs show little: "
    "popular entries go with everything."
)
BINS = 10
STRONG = (0.5, 0.8)
"""Conditional probabilities from which on a pair counts as strongly co-activated."""


GOAL = 1.5
"""How much closer than by chance an entry's closest partner is at least."""


@dataclasses.dataclass(frozen=True)
class Parameters:
    models: tuple[str, ...] = ("smollm2", "gemma3")
    texts: tuple[str, ...] = workload.TEXTS
    context: int = 7424
    queries: int = 1024
    """Last ones of the context."""
    entries: int = 3000
    """Sample of those that at least `min_activation` queries activate; all pairs of it count."""
    min_activation: int = 8
    seed: int = 0


QUICK = {"models": ("smollm2",), "context": 1536, "entries": 500}


def unpacked(bits: torch.Tensor) -> torch.Tensor:
    """float32 [entries, queries] of signatures int64 [entries, words]: 1 where activated."""
    columns = [((bits >> bit) & 1).float() for bit in range(64)]
    return torch.stack(columns, dim=2).flatten(1)


def shuffled(active: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """As many activations of each entry, by queries drawn at random."""
    order = torch.rand(active.shape, generator=random).argsort(1)
    return active.gather(1, order)


def conditional(active: torch.Tensor) -> torch.Tensor:
    """P(j | i) of all pairs i != j, flat, for active float32 [entries, queries]."""
    both = active @ active.T
    given = both / active.sum(1, keepdim=True)
    return given[~torch.eye(len(active), dtype=torch.bool)]


def closest(active: torch.Tensor) -> torch.Tensor:
    """[entries]: Jaccard similarity of each entry's activations to those of its closest partner."""
    both, each = active @ active.T, active.sum(1)
    similar = both / (each[:, None] + each - both)
    return similar.fill_diagonal_(0).max(1).values


def sampled(layer: LayerTrace, parameters: Parameters, random: torch.Generator) -> torch.Tensor:
    """float32 [entries, queries]: activations of a sample of the layer's entries."""
    active = unpacked(signatures(layer, parameters.queries))
    often = (active.sum(1) >= parameters.min_activation).nonzero()[:, 0]
    picked = often[torch.randperm(len(often), generator=random)[: parameters.entries]]
    return active[picked]


def run(parameters: Parameters, report: Report) -> None:
    """Distribution of P(j | i) for each model and text, and by chance."""
    random = torch.Generator().manual_seed(parameters.seed)
    for model in parameters.models:
        for text in parameters.texts:
            title = f"{workload.RECORDINGS[model].title}, {text}"
            layers = workload.recorded(model, text, context=parameters.context, steps=1)
            samples = [sampled(layer, parameters, random) for layer in layers]
            found = [conditional(active) for active in samples]
            dealt = [shuffled(active, random) for active in samples]
            chance = [conditional(active) for active in dealt]
            for name, values in (("recorded", found), ("by chance", chance)):
                histogram(report, f"{title}, {name}: pairs with P(j|i)", values)
                for least in STRONG:
                    report.measure(
                        f"{title}, {name}: pairs with P(j|i) of at least {least:g}",
                        "share",
                        [float((row >= least).float().mean()) for row in values],
                    )
            similar = {
                "recorded": [closest(active) for active in samples],
                "by chance": [closest(active) for active in dealt],
            }
            for name, values in similar.items():
                histogram(report, f"{title}, {name}: entries with a closest partner", values)
            medians = {
                name: [float(row.median()) for row in values] for name, values in similar.items()
            }
            for name, values in medians.items():
                report.measure(f"{title}, {name}: closest partner, median entry", "Jaccard", values)
            report.at_least(
                f"{title}: similarity of the closest partner / by chance",
                sum(medians["recorded"]) / sum(medians["by chance"]),
                GOAL,
            )
    report.note(
        f"a repetition is a layer; entries that at least {parameters.min_activation} of "
        f"{parameters.queries} queries activate; a query activates a tenth of the context"
    )


def histogram(report: Report, title: str, layers: Sequence[torch.Tensor]) -> None:
    """Share of the values of each layer, all in [0, 1], that lie about the centre of each bin."""
    shares = [row.histc(BINS, 0, 1) / len(row) for row in layers]
    for number in range(BINS):
        centre = (number + 0.5) / BINS
        report.measure(f"{title} about {centre:g}", "share", [float(row[number]) for row in shares])


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    titles = dict.fromkeys(
        ", ".join(m["name"].split(":")[0].split(", ")[:2]) for m in result["measurements"]
    )
    series = "(?P<series>recorded|by chance)"
    panels = [
        plots.Panel(
            rf"{re.escape(title)}, {series}: {what} about (?P<x>[\d.]+)", xlabel, ylabel, title
        )
        for title in titles
        for what, xlabel, ylabel in (
            (
                r"pairs with P\(j\|i\)",
                "P(j is activated | i is activated)",
                "pairs of entries (share)",
            ),
            (
                "entries with a closest partner",
                "Jaccard similarity to the closest partner",
                "entries (share)",
            ),
        )
    ]
    plots.draw(result, path, panels)
