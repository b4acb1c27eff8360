"""Fig. 11: decoding by SWARM and by others, at equal budget on four drives.

`model`: SmolLM2 decodes a text through `patch`, each method with drives of its own; what they do
takes turns. The drives are slowed until reading without a cache takes several times as long as
computing, as Qwen3-32B on an H20 with four PM9A3 has it at 128K tokens (3.2 GiB at 27.6 GB/s
against 65.6 GB of weights at 4 TB/s: 7.6 times).

`replay`: recorded layers with the entries of the paper's models are decoded from the same kind of
drives, and a token's time is modelled from what their reads took.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from tqdm import tqdm

import swarm_kv
from benchmarks import contexts, decoding, plots, workload
from benchmarks.contexts import Context
from benchmarks.decoding import Cost, Decoder
from benchmarks.drives import PM9A3, Drives, checked_drives, stand_in_drives
from benchmarks.harness import Report
from benchmarks.methods import METHODS, OURS
from swarm_kv import compat, models, texts
from swarm_kv import eval as evaluation
from swarm_kv.cache import kv_bytes
from swarm_kv.trace import LayerTrace

PAPER = (
    "(a) tokens per second 3.99, 1.76 and 1.47 times those of No Cluster, InfLLM and PQCache; (b) "
    "bandwidth during retrieval 3.95, 2.67 and 1.55 times theirs; (c) accuracy closest to that of "
    "exact selection. All at 10 % of the context; cache sizes are not given."
)
REMARK = (
    "all methods run on this store here, which joins and balances everybody's reads: what remains "
    "of the paper's factor is the idea alone. Single entries of 4 KiB reach 0.65 of these drives' "
    "bandwidth and blocks of 128 all of it, so at equal budget and 4 KiB nothing can be more than "
    "1.5 times as fast as PQCache, or faster than InfLLM where its few blocks spread evenly. What "
    "clusters change is how much has to be read for the same attention: at half the budget the "
    "default still finds more of it than PQCache and InfLLM at the whole. No Cluster scores "
    "every key."
)
HALF = "swarm, half the budget"
COMPARED = {**METHODS, HALF: {"sparsity": 0.05}}
THROUGHPUT = {"No Cluster": 3.99, "InfLLM": 1.76, "PQCache": 1.47}
BANDWIDTH = {"No Cluster": 3.95, "InfLLM": 2.67, "PQCache": 1.55}
RECALL_BELOW_PQCACHE = 0.02
WINDOW_ROOM = 256 << 10
"""Bytes per layer that windows may grow by while nothing is cached."""
DRIVES_BYTES = 640 << 20
"""Of all drives of a method together."""
ENTRY_SIZES = (4096, 2048)
INDEX_SHARE = 0.12
"""Of the keys' bytes: what selection reads in all methods but No Cluster, at most."""
HBM = 4e12
"""Bytes per second of an H20's memory."""


@dataclasses.dataclass(frozen=True)
class Parameters:
    parts: tuple[str, ...] = ("model", "replay")
    drives: int = 4
    context: int = 7424
    steps: int = 5
    """Tokens that each method decodes at a time."""
    rounds: int = 2
    warm: int = 10
    """Tokens that fill the cache before."""
    slowdown: float = 500.0
    """The drives of `model` are PM9A3 at 1/`slowdown` of their rates."""
    caches: tuple[float, ...] = (0.0, 0.10)
    """Shares of the context that the cluster cache holds."""
    replay_contexts: tuple[int, ...] = (7424, 31744)
    """Of `workload.RECORDINGS`, in their order; 0 leaves one out."""
    replay_steps: int = 8
    replay_slowdown: float = 200.0


QUICK = {
    "context": 1024,
    "steps": 2,
    "rounds": 1,
    "warm": 2,
    "caches": (0.10,),
    "replay_contexts": (1024, 0),
    "replay_steps": 2,
}


def run(parameters: Parameters, report: Report) -> None:
    if "model" in parameters.parts:
        run_model(parameters, report)
    if "replay" in parameters.parts:
        run_replay(parameters, report)


# ---- a model


class Session:
    """A model that decodes a text by one method, from drives of its own."""

    def __init__(
        self, method: str, parameters: Parameters, context: Context, drives: Drives
    ) -> None:
        self._model, _ = models.load("smollm2")
        self._ids, self._drives = context.ids, drives
        whole = kv_bytes(self._model.config, self._model.dtype, parameters.context)
        config = swarm_kv.SwarmConfig(
            **drives.settings, dram_bytes=4 * whole + (256 << 20), **COMPARED[method]
        )
        self.swarm = swarm_kv.patch(self._model, config)
        self._name = compat.cache_arg(self._model)
        self._at = context.tokens
        self._charged = 0
        with drives.unthrottled():
            self._cache = context.cache(self.swarm)

    def close(self) -> None:
        del self._cache
        self.swarm.unpatch()

    @torch.no_grad()
    def feed(self, tokens: slice) -> torch.Tensor:
        """Log-probabilities [vocabulary] after these tokens."""
        out = self._model(
            self._ids[:, tokens],
            use_cache=True,
            **{self._name: self._cache},
            **compat.last_logits_only(self._model),
        )
        return out.logits[0, -1].float().log_softmax(-1)

    def limit_cache(self, share: float) -> None:
        """Let the cluster cache hold `share` of the stored entries, and windows grow a little."""
        store = self.swarm.store
        store.charge(-self._charged)
        rows = [row for layer in self._cache.layers for row in layer.rows]
        stored = sum(row.limit for row in rows)
        self._charged = decoding.beyond(store, int(share * stored), WINDOW_ROOM * len(rows))
        store.charge(self._charged)

    def decode(self, steps: int) -> Decoded:
        before = self.swarm.store.counters()
        found = []
        began = time.perf_counter()
        for _ in range(steps):
            found.append(self.feed(slice(self._at, self._at + 1)))
            self._at += 1
        seconds = time.perf_counter() - began
        after = self.swarm.store.counters()
        read = [
            sum(d[name] for d in after["drives"]) - sum(d[name] for d in before["drives"])
            for name in ("read_bytes", "reads")
        ]
        return Decoded(steps / seconds, read[0] / steps, read[1] / steps, torch.stack(found))


@dataclasses.dataclass(frozen=True)
class Decoded:
    """Some steps of one method.

    Attributes:
        tokens_per_second: of decoding.
        bytes, requests: read per token.
        log_probs: [steps, vocabulary].
    """

    tokens_per_second: float
    bytes: float
    requests: float
    log_probs: torch.Tensor


@contextlib.contextmanager
def sessions(
    parameters: Parameters, context: Context, report: Report
) -> Iterator[dict[str, Session]]:
    """One per method."""
    drives = [PM9A3.slower(parameters.slowdown)] * parameters.drives
    size = DRIVES_BYTES // parameters.drives
    with contextlib.ExitStack() as stack:
        opened = {}
        for method in tqdm(COMPARED, desc="fig11, methods", disable=None):
            if not opened:
                own = stack.enter_context(checked_drives(drives, size, report, checked=[64 << 10]))
            else:
                own = stack.enter_context(stand_in_drives(drives, size, report.paths))
            opened[method] = Session(method, parameters, context, own)
            stack.callback(opened[method].close)
        yield opened


def run_model(parameters: Parameters, report: Report) -> None:
    model, tokenizer = models.load("smollm2")
    count = parameters.rounds * parameters.steps
    warm = {share: parameters.warm if share else 1 for share in parameters.caches}
    steps = sum(warm.values()) + len(warm) * count
    ids = texts.token_ids(tokenizer, parameters.context + steps)
    context = contexts.computed(model, ids, parameters.context - 1)
    reference = context.reference(model)
    with sessions(parameters, context, report) as opened:
        at = 0
        for share in parameters.caches:
            decoded: dict[str, list[Decoded]] = {method: [] for method in opened}
            for session in opened.values():
                session.limit_cache(share)
                session.decode(warm[share])
            at += warm[share]
            for _ in tqdm(
                range(parameters.rounds), desc=f"fig11, {share:.0%} cached", disable=None
            ):
                for method, session in opened.items():
                    decoded[method].append(session.decode(parameters.steps))
            true = reference[at : at + count]
            at += count
            report_model(f"SmolLM2, {share:.0%} cached", decoded, true, report)
    report.note(
        f"model: SmolLM2-135M in float32 (entries of 1.5 KiB), {parameters.context} tokens of "
        "context, a tenth of it selected, by `swarm, half the budget` a twentieth; methods "
        "differ by the settings of swarm_kv.baselines, share model, store and cache code, and "
        "take turns"
    )


def report_model(
    case: str, decoded: dict[str, list[Decoded]], true: torch.Tensor, report: Report
) -> None:
    for method, runs in decoded.items():
        found = torch.cat([one.log_probs for one in runs])
        kl = evaluation.kl_divergence(true, found).mean().item()
        rate = [one.tokens_per_second for one in runs]
        report.measure(f"{case}, {method}: decoding", "tokens/s", rate)
        report.measure(f"{case}, {method}: read", "B/token", [one.bytes for one in runs])
        report.measure(
            f"{case}, {method}: requests", "requests/token", [one.requests for one in runs]
        )
        report.measure(f"{case}, {method}: mean KL(full || sparse)", "nats", kl)
    for own in (OURS, HALF):
        for method, goal in THROUGHPUT.items():
            ratios = [
                ours.tokens_per_second / theirs.tokens_per_second
                for ours, theirs in zip(decoded[own], decoded[method], strict=True)
            ]
            report.measure(f"{case}: tokens/s, {own} / {method}", "ratio", ratios)
            report.at_least(f"{case}: tokens/s, {own} / {method}", statistics.median(ratios), goal)


# ---- recorded layers


def run_replay(parameters: Parameters, report: Report) -> None:
    drives = [PM9A3.slower(parameters.replay_slowdown)] * parameters.drives
    costs: dict[tuple[int, float, str], list[Cost]] = {}
    contexts: dict[int, list[int]] = {}
    with checked_drives(drives, DRIVES_BYTES // parameters.drives, report) as opened:
        for layer, entry_bytes in tqdm(list(replayed(parameters)), desc="fig11", disable=None):
            contexts.setdefault(entry_bytes, []).append(layer.settings.context)
            for method, settings in COMPARED.items():
                with decoding.decoding(layer, opened, **settings) as decoder:
                    for share in parameters.caches:
                        cost = decoded_at(decoder, share, parameters.replay_steps)
                        costs.setdefault((entry_bytes, share, method), []).append(cost)
    for entry_bytes, seen in contexts.items():
        for share in parameters.caches:
            by_method = {method: costs[entry_bytes, share, method] for method in COMPARED}
            report_replay(entry_bytes, share, by_method, report)
            if opened.throttled:
                report_models(entry_bytes, share, by_method, seen, parameters, report)
    report.note(
        "replay: recorded layers of "
        + " and ".join(r.title for r in workload.RECORDINGS.values())
        + ", their heads repeated until entries have the bytes named; reads are real"
    )
    report.note(
        "modelled tokens/s: layers x (I/O at the drives' full rates + scoring) + weights, both at "
        f"{HBM / 1e12:g} TB/s; No Cluster reads all keys to score them, the others 12 % of "
        "that; nothing overlaps"
    )


def replayed(parameters: Parameters) -> Iterator[tuple[LayerTrace, int]]:
    """Layers, and the bytes of an entry that they were widened to."""
    for model, context in zip(workload.RECORDINGS, parameters.replay_contexts, strict=True):
        if context == 0:
            continue
        numbers = workload.RECORDINGS[model].layers
        layers = workload.recorded(
            model, context=context, steps=2 * parameters.replay_steps, layers=numbers[1::2]
        )
        for layer in layers:
            for entry_bytes in ENTRY_SIZES:
                yield workload.widened(layer, entry_bytes), entry_bytes


def decoded_at(decoder: Decoder, share: float, steps: int) -> Cost:
    """Mean cost of `steps` steps, after as many that fill the cache."""
    decoder.limit_cache(share)
    if share:
        decoder.steps(steps, judged=False)
    return decoding.mean(decoder.steps(steps, first=steps))


def report_replay(
    entry_bytes: int, share: float, by_method: dict[str, list[Cost]], report: Report
) -> None:
    case = f"entries of {entry_bytes >> 10} KiB, {share:.0%} cached"
    for method, own in by_method.items():
        report.measure(f"{case}, {method}: I/O", "s", [cost.seconds for cost in own])
        report.measure(f"{case}, {method}: selecting", "s", [cost.selecting for cost in own])
        report.measure(f"{case}, {method}: read", "B", [cost.bytes for cost in own])
        report.measure(f"{case}, {method}: requests", "requests", [cost.requests for cost in own])
        report.measure(f"{case}, {method}: recall", "share", [cost.recall for cost in own])
        report.measure(
            f"{case}, {method}: bandwidth", "B/s", [cost.bytes_per_second for cost in own]
        )
    recall = {name: statistics.mean(c.recall for c in own) for name, own in by_method.items()}
    for mine in (OURS, HALF):
        for method in THROUGHPUT:
            faster = [
                theirs.seconds / ours.seconds
                for ours, theirs in zip(by_method[mine], by_method[method], strict=True)
            ]
            report.measure(f"{case}: I/O time, {method} / {mine}", "ratio", faster)
        report.at_least(
            f"{case}: recall, {mine} - PQCache",
            recall[mine] - recall["PQCache"],
            -RECALL_BELOW_PQCACHE,
        )


def report_models(
    entry_bytes: int,
    share: float,
    by_method: dict[str, list[Cost]],
    contexts: list[int],
    parameters: Parameters,
    report: Report,
) -> None:
    """Tokens per second of the paper's models whose entries are of this size."""
    for geometry in workload.GEOMETRIES:
        if geometry.entry_bytes != entry_bytes:
            continue
        case = f"{geometry.name}, {share:.0%} cached, modelled"
        rates = {
            method: [
                1 / token_seconds(geometry, method, cost, context, parameters.replay_slowdown)
                for cost, context in zip(costs, contexts, strict=True)
            ]
            for method, costs in by_method.items()
        }
        for method, found in rates.items():
            report.measure(f"{case}: {method}", "tokens/s", found)
        for method, goal in THROUGHPUT.items():
            ratios = [a / b for a, b in zip(rates[OURS], rates[method], strict=True)]
            report.at_least(f"{case}: tokens/s, {OURS} / {method}", statistics.median(ratios), goal)


def token_seconds(
    geometry: workload.Geometry, method: str, cost: Cost, context: int, slowdown: float
) -> float:
    keys = context * geometry.entry_bytes / 2
    scoring = keys * (1.0 if method == "No Cluster" else INDEX_SHARE) / HBM
    attending = cost.selected * geometry.entry_bytes / HBM
    layer = cost.seconds / slowdown + scoring + attending
    return geometry.layers * layer + geometry.weights / HBM


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    methods = "|".join(re.escape(method) for method in (HALF, *METHODS))
    replayed = rf"(?P<x>entries of \d KiB, \d+% cached), (?P<series>{methods})"
    model = rf"(?P<x>SmolLM2, \d+% cached), (?P<series>{methods})"
    panels = [
        plots.Panel(f"{model}: decoding", "", "tokens/s", "SmolLM2, measured", "bars"),
        plots.Panel(f"{replayed}: I/O", "", "I/O time per layer and step (ms)", "", "bars", 1e3),
        plots.Panel(f"{replayed}: bandwidth", "", "MB/s", "", "bars", 1e-6),
        plots.Panel(f"{replayed}: recall", "", "recall", "", "bars"),
    ]
    plots.draw(result, path, panels)
