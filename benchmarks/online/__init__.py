"""The online stage: reads, scheduling, prefetch, maintenance, the cluster cache, and stress.

Six parts. `reads`: retrieval against fio on stand-in drives. `scheduling`: Fig. 14 of the paper.
`prefetch`: what predicted queries find, and how much I/O time they hide. `maintenance`: Table 5,
and recall after thousands of tokens. `cache`: Fig. 15. `stress`: ten thousand steps over drives
that fail. All ratios are made within this run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from benchmarks.harness import Report, Unavailable
from benchmarks.offline import replays
from benchmarks.online import cache, maintenance, prefetch, reads, scheduling, stress
from swarm_kv.trace import LayerTrace


@dataclasses.dataclass(frozen=True)
class Parameters:
    parts: tuple[str, ...] = (
        "reads",
        "scheduling",
        "prefetch",
        "maintenance",
        "cache",
        "stress",
    )
    drives: tuple[int, ...] = (1, 2, 4, 8)
    """How many are read from, in `reads`."""
    repeats: int = 3
    scheduling_steps: int = 12
    """Test queries of each layer."""
    smollm2_context: int = 6144
    gemma_context: int = 16384
    """0 leaves the model out of `scheduling`, `prefetch` and `cache`."""
    prefetch_context: int = 4096
    prefetch_tokens: int = 48
    ratios: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0)
    """Compute over I/O time, in `prefetch`."""
    maintained_context: int = 5632
    maintained_steps: int = 2048
    maintained_layers: tuple[int, ...] = (2, 10, 18, 26)
    cache_steps: int = 512
    """Consecutive queries, in `cache`."""
    cache_ratios: tuple[float, ...] = cache.RATIOS
    stress_steps: int = 10_000
    seed: int = 0


QUICK: dict[str, Any] = {
    "drives": (1, 2),
    "repeats": 1,
    "scheduling_steps": 3,
    "smollm2_context": 2048,
    "gemma_context": 0,
    "prefetch_context": 2048,
    "prefetch_tokens": 16,
    "ratios": (0.0, 1.0),
    "maintained_context": 1024,
    "maintained_steps": 768,
    "maintained_layers": (10,),
    "cache_steps": 64,
    "cache_ratios": (0.10, 0.25),
    "stress_steps": 2000,
}

MODELS = {"smollm2": (2, 10, 18, 26), "gemma3": (5, 11, 17)}
TEXTS = ("topics", "stdlib")
WINDOW = 256
"""Tokens before the first test query that are in memory."""


def run(parameters: Parameters, report: Report) -> None:
    for name in parameters.parts:
        try:
            PARTS[name](parameters, report)
        except Unavailable as error:
            report.note(f"{name}: not measured: {error}")


def run_reads(parameters: Parameters, report: Report) -> None:
    reads.run(report, counts=parameters.drives, repeats=parameters.repeats)


def run_scheduling(parameters: Parameters, report: Report) -> None:
    layers = list(recorded(parameters, TEXTS[:1], steps=1024, stride=32))
    scheduling.run(report, layers, steps=parameters.scheduling_steps)


def run_prefetch(parameters: Parameters, report: Report) -> None:
    prefetch.run(
        report,
        smollm2_context=parameters.prefetch_context,
        gemma_context=parameters.prefetch_context if parameters.gemma_context else 0,
        tokens=parameters.prefetch_tokens,
        ratios=parameters.ratios,
        repeats=parameters.repeats,
    )


def run_maintenance(parameters: Parameters, report: Report) -> None:
    settings = maintenance.Parameters(
        layers=parameters.maintained_layers,
        context=parameters.maintained_context,
        steps=parameters.maintained_steps,
        distance_steps=min(256, parameters.maintained_steps // 8),
    )
    maintenance.run(settings, report)


def run_cache(parameters: Parameters, report: Report) -> None:
    cache.run(
        recorded(parameters, TEXTS, steps=parameters.cache_steps, stride=1),
        report,
        ratios=parameters.cache_ratios,
    )


def run_stress(parameters: Parameters, report: Report) -> None:
    stress.run(stress.Parameters(steps=parameters.stress_steps), report)


PARTS = {
    "reads": run_reads,
    "scheduling": run_scheduling,
    "prefetch": run_prefetch,
    "maintenance": run_maintenance,
    "cache": run_cache,
    "stress": run_stress,
}


def recorded(
    parameters: Parameters, names: tuple[str, ...], *, steps: int, stride: int
) -> Iterator[LayerTrace]:
    """Recorded layers of both models, every `stride`-th of the last `steps` tokens a test query."""
    contexts = {"smollm2": parameters.smollm2_context, "gemma3": parameters.gemma_context}
    for model, layers in MODELS.items():
        context = contexts[model]
        if context:
            for text in names:
                tokens = context + WINDOW + steps
                trace = replays.recorded(model, text, context, tokens, layers, stride)
                yield from trace.layers.values()
