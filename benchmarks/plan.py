"""What `swarm-kv plan` reckons against what decoding steps do.

Layers of recorded models decode on drives in virtual time; then a whole model decodes on stand-in
drives, with all its layers, prefill and cache, and its time per token is compared, too. The hit
rate is each run's own: what a text makes of the cache no plan can know.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

import swarm_kv
from benchmarks import decoding, plots, workload
from benchmarks.drives import PM9A3, Drives, checked_drives
from benchmarks.harness import Report
from swarm_kv import SwarmConfig, compat, models, plan, texts
from swarm_kv.cache import kv_bytes
from swarm_kv.meter import Stats
from swarm_kv.plan import Plan, PlannedDrive
from swarm_kv.replay import Drive

REMARK = (
    "Sizes are exact but for the blocks in which space is taken. Bytes and requests of a step "
    "depend on how the selected entries lie, of which a plan knows the mean of one small model."
)
WITHIN = 0.20
DRIVES = 4
DRIVE_BYTES = 512 << 20


@dataclasses.dataclass(frozen=True)
class Parameters:
    smollm2: tuple[int, ...] = (3072, 7168)
    """Contexts of SmolLM2."""
    gemma3: tuple[int, ...] = (31488,)
    """Contexts of Gemma 3."""
    smollm2_text: str = "stdlib"
    """Not the one on which the plan's runs (`plan.RUNS`) were measured, on this model."""
    gemma3_text: str = "topics"
    caches: tuple[float, ...] = (0.0, 0.10, 0.25)
    """Share of the entries that the cluster cache may hold."""
    steps: int = 32
    warm_up: int = 32
    """Steps before them, in which the cache fills."""
    whole: int = 3072
    """Context of the whole model, SmolLM2; 0 leaves it out."""
    tokens: int = 40
    """That it decodes."""
    slowdown: float = 1000.0
    """Its drives deliver 1/`slowdown` of their rates: its step is not to be all computing."""


QUICK = {"smollm2": (1024,), "gemma3": (), "steps": 4, "warm_up": 4, "whole": 2048, "tokens": 6}


@dataclasses.dataclass(frozen=True)
class Step:
    """Of one decoding step, all layers together."""

    bytes: float
    requests: float
    io_seconds: float


def run(parameters: Parameters, report: Report) -> None:
    """Compare plan and run, layer by layer and as a whole."""
    cases = [("smollm2", parameters.smollm2_text, tokens) for tokens in parameters.smollm2]
    cases += [("gemma3", parameters.gemma3_text, tokens) for tokens in parameters.gemma3]
    for model, text, context in tqdm(cases, desc="plan", disable=None):
        recorded = workload.recorded(
            model,
            text,
            context=context,
            steps=parameters.warm_up + parameters.steps,
        )
        ready = [decoding.prefilled(layer, drives=DRIVES) for layer in recorded]
        for cache in parameters.caches:
            title = f"{model}, {context} tokens, {cache:.0%} cached"
            compare(report, title, *layers(model, ready, cache, parameters))
    if parameters.whole:
        drive = PM9A3.slower(parameters.slowdown)
        with checked_drives([drive] * DRIVES, DRIVE_BYTES, report) as drives:
            whole(drives, report, parameters)
    report.note(
        "plans have the hit rate of the run; recorded layers read from four PM9A3 in virtual time, "
        "and a step is that of all layers of the model, by the mean of those recorded"
    )


def layers(
    model: str, ready: Sequence[decoding.Prefilled], cache: float, parameters: Parameters
) -> tuple[Step, Step]:
    """Steps of the recorded layers of a model, and what a plan says of them."""
    found, hits = [], []
    for layer in ready:
        with decoding.simulated(layer, PM9A3, DRIVES, cache=cache) as decoder:
            decoder.steps(parameters.warm_up, judged=False)
            before = served(decoder)
            steps = decoder.steps(parameters.steps, first=parameters.warm_up, judged=False)
            after = served(decoder)
        found.append(decoding.mean(steps))
        hits.append((after[0] - before[0]) / (after[1] - before[1]))
    recorded = ready[0].layer
    planned = plan.make(
        plan.load_config(model),
        recorded.settings.context + workload.WINDOW,
        [PlannedDrive("PM9A3", Drive(1 / PM9A3.iops, 1 / PM9A3.bytes_per_second))] * DRIVES,
        dtype=recorded.k.dtype,
        hit_rate=statistics.mean(hits),
    )
    count = planned.layers
    measured = Step(
        count * statistics.mean(cost.bytes for cost in found),
        count * statistics.mean(cost.requests for cost in found),
        count * statistics.mean(cost.seconds for cost in found),
    )
    return measured, step_of(planned)


def served(decoder: decoding.Decoder) -> tuple[int, int]:
    """Entries that the cache served so far, and all that were wanted."""
    counts = decoder.store.counters()["decode"]
    return counts["hits"], counts["wanted"]


def step_of(planned: Plan) -> Step:
    row = planned.rows[0]
    return Step(row.bytes_per_step, row.requests_per_step, row.io_seconds)


def compare(report: Report, title: str, measured: Step, planned: Step) -> None:
    """Tell both, and whether they agree."""
    for field, name, unit in (
        ("bytes", "bytes per step", "B"),
        ("requests", "requests per step", "requests"),
        ("io_seconds", "I/O time per step", "s"),
    ):
        figures = getattr(measured, field), getattr(planned, field)
        agree(report, f"{title}: {name}", unit, *figures, checked=field != "requests")


def agree(
    report: Report, title: str, unit: str, measured: float, planned: float, checked: bool = True
) -> None:
    report.measure(f"{title}, measured", unit, measured)
    report.measure(f"{title}, planned", unit, planned)
    if checked:
        report.at_most(f"{title}: |planned / measured - 1|", abs(planned / measured - 1), WITHIN)


# ---- a whole model


def whole(drives: Drives, report: Report, parameters: Parameters) -> None:
    """Let SmolLM2 decode from drives, and from memory, where reads take next to no time."""
    model, tokenizer = models.load("smollm2")
    ids = texts.token_ids(tokenizer, parameters.whole)
    settings: dict[str, Any] = {
        "dram_bytes": kv_bytes(model.config, model.dtype, parameters.whole) // 4,
        "prefetch": "off",  # it would hide a part of the reads, which no plan can foresee
        "recall_every": 0,
    }
    names = [f"/{number}" for number in range(DRIVES)]
    memory = {"engine": "memory", "device_model": drives.models[0].costs}
    seconds, stats = decoded(
        model, ids, parameters.tokens, drives, SwarmConfig(**drives.settings, **settings)
    )
    computing, _ = decoded(
        model, ids, parameters.tokens, drives, SwarmConfig(paths=names, **{**settings, **memory})
    )
    planned = plan.make(
        model.config,
        parameters.whole,
        [PlannedDrive(one.name, Drive(*one.costs)) for one in drives.models],
        dtype=model.dtype,
        dram_bytes=settings["dram_bytes"],
        hit_rate=stats.hit_rate,
        compute_seconds=computing,
    )
    title = f"SmolLM2 as a whole, {parameters.whole} tokens"
    row = planned.rows[0]
    assert row.with_compute is not None
    for name, unit, measured, expected in (
        ("stored", "B", stats.stored_bytes, DRIVES * planned.disk_bytes_per_drive),
        ("index", "B", stats.dram["index"], planned.dram["index"]),
        ("window", "B", stats.dram["window"], planned.dram["window"]),
        ("bytes per step", "B", stats.bytes_per_step, row.bytes_per_step),
        ("tokens per second", "1/s", 1 / seconds, row.with_compute[0]),
    ):
        agree(report, f"{title}: {name}", unit, measured, expected)
    report.measure(f"{title}: hit rate", "share", stats.hit_rate)
    report.measure(f"{title}: time per token without reads", "s", computing)


def decoded(
    model: Any, ids: torch.Tensor, tokens: int, drives: Drives, config: SwarmConfig
) -> tuple[float, Stats]:
    """Seconds per token of greedy decoding after a prefill, and what the store counted."""
    name, last = compat.cache_arg(model), compat.last_logits_only(model)
    with swarm_kv.patch(model, config) as swarm, torch.no_grad():
        cache = {name: swarm.new_cache()}
        with drives.unthrottled():
            logits = model(ids, use_cache=True, **cache, **last).logits
        began = time.perf_counter()
        for _ in range(tokens):
            logits = model(logits[:, -1:].argmax(-1), use_cache=True, **cache).logits
        return (time.perf_counter() - began) / tokens, swarm.stats()


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Planned beside measured."""
    name = r"(?P<x>(?!SmolLM2).+): {}, (?P<series>measured|planned)"
    panels = [
        plots.Panel(
            name.format("bytes per step"), "run", "read per step (MB)", kind="bars", factor=1e-6
        ),
        plots.Panel(name.format("I/O time per step"), "run", "I/O time per step (s)", kind="bars"),
    ]
    plots.draw(result, path, panels, columns=1)
