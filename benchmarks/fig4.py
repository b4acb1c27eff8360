"""Fig. 4 of the paper: entries are activated together far more often than chance would have it.

For pairs of stored entries, how often one is activated by a query that activates the other,
P(j | i), over the last queries of a recorded context. Chance keeps how often each entry is
activated, but deals its activations to queries at random.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

from benchmarks import plots, workload
from benchmarks.harness import Report
from swarm_kv.trace import LayerTrace
from swarm_kv.tune import signatures

PAPER = (
    "Co-activation patterns across models and data (no numbers in the text). Ours: pairs that are "
    "activated together by more than half of the queries are several times as frequent as by "
    "chance, on every model and text."
)
BINS = 10
STRONG = (0.5, 0.8)
"""Conditional probabilities from which on a pair counts as strongly co-activated."""


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


QUICK = {"models": ("smollm2",), "context": 2048, "entries": 1000}


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


def lift(active: torch.Tensor) -> float:
    """P(i and j) of all pairs over what it were if entries were independent."""
    queries = active.shape[1]
    both, each = active @ active.T / queries, active.sum(1) / queries
    other = ~torch.eye(len(active), dtype=torch.bool)
    return float(both[other].sum() / torch.outer(each, each)[other].sum())


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
            chance = [conditional(shuffled(active, random)) for active in samples]
            for name, values in (("", found), (", by chance", chance)):
                histograms = [row.histc(BINS, 0, 1) / len(row) for row in values]
                for number in range(BINS):
                    centre = (number + 0.5) / BINS
                    report.measure(
                        f"{title}{name}: pairs with P(j|i) about {centre:g}",
                        "share",
                        [float(histogram[number]) for histogram in histograms],
                    )
                for least in STRONG:
                    report.measure(
                        f"{title}{name}: pairs with P(j|i) of at least {least:g}",
                        "share",
                        [float((row >= least).float().mean()) for row in values],
                    )
            gains = [lift(active) for active in samples]
            report.measure(f"{title}: co-activation / independent entries", "ratio", gains)
            strong, expected = (
                sum(float((row >= STRONG[0]).float().mean()) for row in rows) / len(rows)
                for rows in (found, chance)
            )
            report.at_least(
                f"{title}: strongly co-activated pairs / by chance",
                strong / max(expected, 1e-9),
                2.0,
            )
    report.note(
        f"a repetition is a layer; entries that at least {parameters.min_activation} of "
        f"{parameters.queries} queries activate; a query activates a tenth of the context"
    )


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    titles = dict.fromkeys(
        m["name"].split(":")[0].removesuffix(", by chance") for m in result["measurements"]
    )
    panels = [
        plots.Panel(
            rf"{title}(?P<series>(, by chance)?): pairs with P\(j\|i\) about (?P<x>[\d.]+)",
            "P(j is activated | i is activated)",
            "pairs of entries (share)",
            title,
            log_y=True,
        )
        for title in titles
    ]
    plots.draw(result, path, panels)
