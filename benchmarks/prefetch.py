"""Reading a layer ahead: how well queries are predicted, and how much of the drives' time it hides.

`predictions` compares what predicted queries would select with what the true ones do, on a real
model and text. `sweep` replays those queries against stand-in drives: a layer's reads are started,
the thread sleeps for as long as a model would compute, and the layer attends. Its three ways take
turns, and all figures are ratios within one run.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks import plots
from benchmarks.drives import PM9A3, Drives, checked_drives
from benchmarks.harness import Report
from swarm_kv import SwarmConfig, models, selectors, texts
from swarm_kv.cache import full_attention_layers
from swarm_kv.layer import CacheState, SwarmLayer
from swarm_kv.predictors import Projection
from swarm_kv.prefetch import USUAL, Controller, Rope, hooked
from swarm_kv.store import Store
from swarm_kv.trace import capturing

SHARE = 0.10
HIDDEN_GOAL = 0.80
SLOWER_GOAL = 1.03
MASS_GOAL = 0.98
"""Of the attention mass that the true query's selection holds, the predicted one's must hold."""
WINDOW_PIECE = 128 << 10
"""Bytes that a window takes at once."""


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What one layer computed on a text, and what was predicted of it.

    Attributes:
        q: [heads, tokens, head_dim], true queries. k, v: [kv_heads, tokens, head_dim].
        scale: multiplies q . k.
        predicted: by the name of a source, queries like q.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    predicted: dict[str, torch.Tensor]


@torch.no_grad()
def record(model: Any, ids: torch.Tensor, numbers: Sequence[int]) -> dict[int, Recorded]:
    """Run a text through the model and keep what `numbers` computed and what they were expected to.

    Args:
        model: of a supported kind, not patched.
        ids: int64 [1, tokens].
        numbers: full-attention layers.
    """
    decoder = model.get_decoder()
    truth: dict[int, tuple[Any, ...]] = {}
    predicted: dict[int, dict[str, torch.Tensor]] = {number: {} for number in numbers}
    hooks = []

    def take(layer: int, *tensors: Any) -> None:
        if layer in numbers:
            truth[layer] = tensors

    def keep(number: int, name: str, hidden: torch.Tensor, kwargs: dict[str, Any]) -> None:
        project, rope = Projection(decoder.layers[number]), Rope(decoder, number)
        predicted[number][name] = project(hidden, rope(hidden, kwargs))[0]

    for number in numbers:
        for name, early in (("decoder_input", True), ("post_attention", False)):
            if number > 0:
                call = functools.partial(keep, number, name)
                hooks += hooked(decoder, number, early, call)
    try:
        with capturing(model, take):
            decoder(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for number in numbers:
        q = truth[number][0]
        predicted[number]["previous"] = torch.cat([q[:, :1], q[:, :-1]], dim=1)
    return {number: Recorded(*truth[number], predicted[number]) for number in numbers}


# ---- how well queries are predicted


@dataclasses.dataclass(frozen=True)
class Prediction:
    """How one source predicted one layer: means over test tokens.

    Attributes:
        cosine: of predicted and true query, mean over heads.
        overlap: share of the truly selected entries that were predicted.
        mass: attention mass of the predicted selection, and of sinks and window.
        best: the same of the true selection.
    """

    layer: int
    source: str
    cosine: float
    overlap: float
    mass: float
    best: float


def predictions(
    layers: dict[int, Recorded], context: int, *, window: int = 256, sinks: int = 4
) -> list[Prediction]:
    """Selections of a tenth of the context by exact keys, as each source predicts them.

    Args:
        layers: recorded layers.
        context: tokens before the first test token.
        window, sinks: always attended.
    """
    rows = []
    for number, layer in layers.items():
        tokens = torch.arange(context, layer.q.shape[1])
        # Attention of each test token over all, averaged over heads; what is stored of it.
        true = _attention(layer, layer.q, tokens)
        stored = slice(sinks, context - window)
        budget = max(1, round(SHARE * context))
        wanted = _top(true[:, stored], budget)
        resident = true.sum(1) - true[:, stored].sum(1)
        best = resident + (true[:, stored] * wanted).sum(1)
        for source, queries in layer.predicted.items():
            chosen = _top(_attention(layer, queries, tokens)[:, stored], budget)
            mass = resident + (true[:, stored] * chosen).sum(1)
            near = torch.cosine_similarity(
                queries[:, tokens].float(), layer.q[:, tokens].float(), dim=-1
            )
            rows.append(
                Prediction(
                    number,
                    source,
                    near.mean().item(),
                    ((chosen & wanted).sum(1) / budget).mean().item(),
                    mass.mean().item(),
                    best.mean().item(),
                )
            )
    return rows


def _attention(layer: Recorded, queries: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """float32 [tests, tokens]: mean over heads of the softmax up to each test token."""
    kv_heads = layer.k.shape[0]
    own = queries[:, tokens].float() * layer.scale
    own = own.reshape(kv_heads, -1, own.shape[-1])
    mass = torch.zeros(len(tokens), layer.k.shape[1])
    later = torch.arange(layer.k.shape[1]) > tokens[:, None]
    for head, keys in zip(own, layer.k, strict=True):
        scores = (head @ keys.float().T).view(-1, *mass.shape)
        mass += scores.masked_fill_(later, -math.inf).softmax(-1).sum(0)
    return mass / queries.shape[0]


def _top(scores: torch.Tensor, budget: int) -> torch.Tensor:
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    return chosen.scatter_(1, scores.topk(min(budget, scores.shape[1]), dim=1).indices, True)


# ---- how much of the drives' time is hidden

WAYS = ("off", "post_attention", "auto")


@dataclasses.dataclass(frozen=True)
class Pass:
    """One run over all steps and layers.

    Attributes:
        way: what `SwarmConfig.prefetch` calls it.
        ratio: compute time over I/O time.
        seconds: of a layer and step, mean.
        io: that it waits for reads or submits them, mean.
        late: entries read late over entries that were wanted and not in memory; 0 when off.
    """

    way: str
    ratio: float
    seconds: float
    io: float
    late: float


def sweep(
    layers: dict[int, Recorded],
    context: int,
    ratios: Sequence[float],
    drives: Drives,
    repeats: int,
    config: Callable[..., SwarmConfig] = SwarmConfig,
) -> list[Pass]:
    """Decoding steps with a pause for compute, at several ratios of compute to I/O.

    Args:
        layers: recorded; what follows `context` is decoded.
        context: tokens of the prefill.
        ratios: compute time over the time that I/O takes when nothing is hidden.
        drives: where the entries lie.
        repeats: passes of each way and ratio.
        config: makes the settings.
    """
    one = next(iter(layers.values()))
    entry = 2 * one.k.shape[0] * one.k.shape[2] * one.k.element_size()
    staging = max(8 << 20, int(8 * SHARE * context * entry))  # a layer's reads twice over
    settings = config(
        paths=drives.paths,
        sparsity=SHARE,
        dram_bytes=staging + len(layers) * context * entry,
        staging_bytes=staging,
        initial_fill="none",
        recluster="off",  # nothing else is read meanwhile
        recall_every=0,
    )
    store = Store(settings)
    try:
        filled = [_prefilled(store, number, layer, context) for number, layer in layers.items()]
        # No cluster cache beyond what windows are about to take: one text again and again would
        # hardly be read.
        dram = store.counters()["dram"]
        growth = len(layers) * (one.q.shape[1] - context) * entry
        room = (-(-growth // WINDOW_PIECE) + 2 * len(layers)) * WINDOW_PIECE
        held = dram["staging"] + dram["window"] + dram["index"] + room
        store.charge(dram["limit"] - held)
        play = functools.partial(_play, store, list(layers.values()), filled, context)
        play("off", 0.0, None, 1.0)  # warms up
        io = statistics.median(play("off", 0.0, None, 1.0).io for _ in range(repeats))
        passes = []
        with tqdm(total=len(ratios) * repeats, desc="compute to I/O", disable=None) as bar:
            for ratio in ratios:
                controllers = [Controller() for _ in layers]
                for _ in range(repeats):
                    passes += [play(way, ratio, controllers, io) for way in WAYS]
                    bar.update()
        return passes
    finally:
        store.close()


def _prefilled(store: Store, number: int, layer: Recorded, context: int) -> SwarmLayer:
    cached = SwarmLayer(store, number, selectors.resolve(store.config.selector), CacheState())
    _call(cached, layer, slice(0, context))
    return cached


def _call(cached: SwarmLayer, layer: Recorded, tokens: slice) -> None:
    cached.update(layer.k[None, :, tokens], layer.v[None, :, tokens])
    cached.attend(layer.q[None, :, tokens], None, layer.scale, None, None)


def _play(
    store: Store,
    layers: list[Recorded],
    filled: list[SwarmLayer],
    context: int,
    way: str,
    ratio: float,
    controllers: list[Controller] | None,
    io: float,
) -> Pass:
    forks = [copy.deepcopy(cached) for cached in filled]
    before = store.counters()
    reading, steps = [], range(context, layers[0].q.shape[1])
    began = time.perf_counter()
    for token in steps:
        now = slice(token, token + 1)
        for number, (cached, layer) in enumerate(zip(forks, layers, strict=True)):
            share = USUAL if way == "post_attention" else 0.0
            if way == "auto":
                share = controllers[number].next()
            if share:
                started = time.perf_counter()
                cached.read_ahead(layer.predicted["post_attention"][None, :, now], share, started)
            time.sleep(ratio * io)
            _call(cached, layer, now)
            reading.append(cached.cost.submitting + cached.cost.waiting)
            if way == "auto":
                controllers[number].add(cached.cost)
    seconds = time.perf_counter() - began
    after = store.counters()

    def grown(purpose: str, name: str) -> int:
        return after[purpose][name] - before[purpose][name]

    missing = grown("decode", "wanted") - grown("decode", "hits")
    late = grown("prefetch", "late") / missing if missing else 0.0
    return Pass(way, ratio, seconds / len(reading), statistics.mean(reading), late)


# ---- the figures

SOURCES = ("post_attention", "decoder_input", "previous")


PAPER = (
    "(§7) while a layer computes, the next one's clusters are selected by this layer's embedding "
    "and read. No figure of its own."
)


@dataclasses.dataclass(frozen=True)
class Parameters:
    smollm2_context: int = 4096
    """Tokens before the first test token."""
    gemma_context: int = 2048
    """0 leaves the model out."""
    tokens: int = 32
    """Test tokens."""
    ratios: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0)
    """Compute over I/O time."""
    replayed: tuple[int, ...] = (2, 10, 18, 26)
    """Layers of SmolLM2 for the sweep."""
    drives: int = 4
    slowdown: float = 300.0
    """The drives are PM9A3 at 1/`slowdown` of their rates."""
    repeats: int = 1
    """Passes of each way and ratio."""


QUICK = {"smollm2_context": 1024, "gemma_context": 0, "tokens": 8, "ratios": (0.0, 1.0)}


def run(parameters: Parameters, report: Report) -> None:
    """What predicted queries find, and how much I/O time they hide."""
    smollm2_context, tokens = parameters.smollm2_context, parameters.tokens
    rows = {}
    recorded = _recorded("smollm2", smollm2_context, tokens)
    rows["SmolLM2"] = predictions(recorded, smollm2_context)
    if parameters.gemma_context:
        recorded_gemma = _recorded("gemma3", parameters.gemma_context, tokens)
        rows["Gemma 3"] = predictions(recorded_gemma, parameters.gemma_context)
    for model, found in rows.items():
        _summarise_predictions(model, found, report)
    layers = {number: recorded[number] for number in parameters.replayed}
    drives = [PM9A3.slower(parameters.slowdown)] * parameters.drives
    size = sum(2 * layer.k.nbytes for layer in layers.values()) // len(drives) + (64 << 20)
    with checked_drives(drives, size, report) as devices:
        passes = sweep(layers, smollm2_context, parameters.ratios, devices, parameters.repeats)
        _summarise_sweep(passes, report)


def _recorded(name: str, context: int, tokens: int) -> dict[int, Recorded]:
    model, tokenizer = models.load(name)
    ids = texts.token_ids(tokenizer, context + tokens)
    return record(model, ids, full_attention_layers(model.config))


def _summarise_predictions(model: str, rows: list[Prediction], report: Report) -> None:
    table = Table(
        title=f"{model}: the query predicted, and what it selects (a tenth of the context)"
    )
    for column in ("source", "cosine", "worst", "overlap", "worst", "mass", "best"):
        table.add_column(column, justify="left" if column == "source" else "right")
    # Layers 0 and 1 have sources of their own.
    for source in SOURCES:
        own = [row for row in rows if row.source == source and row.layer > 1]
        cosines, overlaps = [row.cosine for row in own], [row.overlap for row in own]
        mass = statistics.mean(row.mass for row in own)
        best = statistics.mean(row.best for row in own)
        report.measure(f"{model}, {source}: cosine", "", cosines)
        report.measure(f"{model}, {source}: overlap of selections", "share", overlaps)
        report.measure(f"{model}, {source}: attention mass", "share", [row.mass for row in own])
        table.add_row(
            source,
            f"{statistics.mean(cosines):.3f}",
            f"{min(cosines):.3f}",
            f"{statistics.mean(overlaps):.3f}",
            f"{min(overlaps):.3f}",
            f"{mass:.3f}",
            f"{best:.3f}",
        )
        if source == "post_attention":
            report.at_least(
                f"{model}: attention mass by predicted / by true query", mass / best, MASS_GOAL
            )
    Console(stderr=True, width=120).print(table)


def _summarise_sweep(passes: list[Pass], report: Report) -> None:
    table = Table(title="prefetch: a layer's step, by compute time over I/O time")
    for column in (
        "compute / I/O",
        "I/O waited, off",
        "hidden",
        "late",
        "step / off",
        "auto / off",
    ):
        table.add_column(column, justify="right")
    for ratio in dict.fromkeys(one.ratio for one in passes):
        own = {way: [p for p in passes if (p.way, p.ratio) == (way, ratio)] for way in WAYS}
        off, ahead, auto = (own[way] for way in WAYS)
        hidden = [1 - b.io / a.io for a, b in zip(off, ahead, strict=True)]
        step = [b.seconds / a.seconds for a, b in zip(off, ahead, strict=True)]
        adaptive = [b.seconds / a.seconds for a, b in zip(off, auto, strict=True)]
        case = f"prefetch, compute / I/O {ratio:g}"
        report.measure(f"{case}: I/O waited without", "s", [p.io for p in off])
        report.measure(f"{case}: share of I/O hidden", "share", hidden)
        report.measure(f"{case}: read late", "share", [p.late for p in ahead])
        report.measure(f"{case}: step, with / without", "ratio", step)
        report.measure(f"{case}: step, auto / without", "ratio", adaptive)
        if ratio >= 1:
            report.at_least(f"{case}: I/O hidden", statistics.median(hidden), HIDDEN_GOAL)
        report.at_most(f"{case}: step, auto / without", statistics.median(adaptive), SLOWER_GOAL)
        table.add_row(
            f"{ratio:g}",
            f"{1e3 * statistics.median(p.io for p in off):.1f} ms",
            f"{statistics.median(hidden):.1%}",
            f"{statistics.median(p.late for p in ahead):.1%}",
            f"{statistics.median(step):.3f}",
            f"{statistics.median(adaptive):.3f}",
        )
    Console(stderr=True, width=120).print(table)
    report.note(
        "queries recorded from SmolLM2 are replayed; a thread that sleeps stands for "
        "compute; `auto` learns within its passes"
    )


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """What is hidden, and what a step takes, by compute over I/O time."""
    name = r"prefetch, compute / I/O (?P<x>[\d.]+): "
    plots.draw(
        result,
        path,
        [
            plots.Panel(name + "(?P<series>share of I/O hidden)", "compute / I/O time", "share"),
            plots.Panel(
                name + r"step, (?P<series>.+ / without)",
                "compute / I/O time",
                "time of a step, of that without",
            ),
        ],
    )
