"""Ways to cluster and select, replayed on recorded activity of real models."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import faiss
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness import Report
from swarm_kv import SwarmConfig, clusterers, models, ops, replay, selectors, texts, trace
from swarm_kv.index import Index, build, sequence_blocks
from swarm_kv.replay import PM9A3, Evaluation
from swarm_kv.trace import LayerTrace
from swarm_kv.tune import coded, signatures

ENTRY_SIZES = (4096, 1024)
"""Bytes of an entry: Qwen3-32B's, and that of a model with a quarter of its KV heads."""
DRIVE_COUNTS = (1, 4)
FINDING_BYTES_PER_COPY = 9
FINDING_BYTES_PER_ENTRY = 4
"""What the store holds to find copies (csrc/core/segment.h): drive, slot and routing of each, and
for each entry, where some have several, where its copies begin. Clusters are counted with the index
that selects by them; checksums and what the cluster cache knows are not index."""


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to lay out and to select, as settings."""

    name: str
    selector: str
    settings: dict[str, Any]


DEFAULT = "default: hypergraph, intervals"
BASELINE = "tokens by product quantisation"
TIME_GOALS = {4096: 0.80, 1024: 0.55}
WAYS = (
    Way(DEFAULT, "interval", {}),
    Way("hypergraph, two_level", "two_level", {"clusterer": "hypergraph"}),
    Way("token order, intervals", "interval", {"clusterer": "sequence_blocks", "max_size": 16}),
    Way("Algorithm 1, intervals", "interval", {"clusterer": "swarm", "tau": 0.6}),
    Way("Algorithm 1, two_level", "two_level", {"clusterer": "swarm", "tau": 0.6}),
    Way("Algorithm 1 τ .75, two_level", "two_level", {"clusterer": "swarm", "tau": 0.75}),
    Way(
        "Algorithm 1 as printed, medoids",
        "medoid",
        {"clusterer": "swarm", "tau": 0.6, "cold": "single"},
    ),
    Way("no_replica, intervals", "interval", {"clusterer": "no_replica", "tau": 0.6}),
    Way("no_replica, two_level", "two_level", {"clusterer": "no_replica", "tau": 0.6}),
    Way("medoid_only, two_level", "two_level", {"clusterer": "medoid_only", "tau": 0.6}),
    Way("kmeans_keys, two_level", "two_level", {"clusterer": "kmeans_keys"}),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """What one way gave on one layer."""

    way: str
    drives: int
    entry_bytes: int
    result: Evaluation


def recorded(
    model: str, text: str, context: int, tokens: int, layers: tuple[int, ...], stride: int
) -> trace.Trace:
    """Activity of `layers` on the first `tokens` tokens of a text, the first `context` stored."""
    loaded, tokenizer = models.load(model)
    ids = texts.token_ids(tokenizer, tokens, text)
    return trace.record(loaded, ids, context=context, layers=layers, stride=stride, name=model)


def every_way(layer: LayerTrace) -> Iterator[Row]:
    """Rows of all ways and baselines on one layer."""
    base = SwarmConfig(paths=["unused"])
    ready = prepared(layer, base)
    baseline = plain_codes(layer, index_bytes(ready[2]) / ready[2].entries)
    yield from by_tokens(layer, *baseline)
    yield from by_tokens_and_gaps(layer, ready[2], *baseline)
    for way in WAYS:
        yield from by_way(layer, way, base, ready)
    yield from by_pages(layer, 16, "bounds")
    yield from by_pages(layer, 128, "representatives")


def summarise(table: dict[tuple[str, int, int], list[Evaluation]], report: Report) -> None:
    """Means over layers and texts, seconds as ratios to the baseline on the same layer."""
    console = Table(title="10 % of the context: means over layers and texts")
    for column in ("way", "drives", "entry", "recall", "of tokens'", "I/O time", "reads", "index"):
        console.add_column(column, justify="left" if column == "way" else "right")
    console.add_column("overhead", justify="right")
    for (way, drives, entry_bytes), results in table.items():
        base = table[(BASELINE, drives, entry_bytes)]
        one = replay.mean(results)
        recall = one.recall / replay.mean(base).recall
        seconds = statistics.mean(r.seconds / b.seconds for r, b in zip(results, base, strict=True))
        case = f"{way}; {drives} drives, {entry_bytes} B"
        report.measure(f"{case}: recall", "share", [r.recall for r in results])
        report.measure(f"{case}: I/O time", "s", [r.seconds for r in results])
        report.measure(f"{case}: requests", "requests", [r.reads for r in results])
        console.add_row(
            way,
            str(drives),
            str(entry_bytes),
            f"{one.recall:.3f}",
            f"{recall:.3f}",
            f"{seconds:.2f}",
            f"{one.reads:.0f}",
            f"{one.index_share:.1%}",
            f"{one.overhead:.2f}",
        )
        if way == DEFAULT and drives == 1:
            report.at_least(f"{case}: recall / {BASELINE}", recall, 0.97)
            report.at_most(f"{case}: I/O time / {BASELINE}", seconds, TIME_GOALS[entry_bytes])
            if entry_bytes == ENTRY_SIZES[0]:
                report.at_most("default: index / keys in 16 bits", one.index_share, 0.12)
                report.at_most("default: storage overhead", one.overhead, 2.0)
    Console(stderr=True, width=120).print(console)
    report.note(
        "replays: recall is the attention mass outside sinks and recent tokens that the fetched "
        "entries hold; I/O time by the device model of a PM9A3 with nothing cached and entries "
        "of the size named; what an interval passes over is attended too, as in decoding"
    )


def prepared(layer: LayerTrace, config: SwarmConfig) -> tuple[torch.Tensor, torch.Tensor, Index]:
    """Signatures, keys, and an index in token order."""
    keys = layer.keys.float()
    size = config.code_size(keys.shape[2])
    return (
        signatures(layer, config.profile_queries),
        keys,
        coded(layer, config.profile_queries, size, config.code_bits),
    )


def index_bytes(index: Index) -> int:
    """Of choosing and finding entries."""
    copies = index.members.numel()
    starts = FINDING_BYTES_PER_ENTRY * index.entries if copies > index.entries else 0
    return index.nbytes() + FINDING_BYTES_PER_COPY * copies + starts


def by_way(layer: LayerTrace, way: Way, base: SwarmConfig, ready: Any) -> Iterator[Row]:
    config = dataclasses.replace(base, **way.settings)
    bits, keys, plain = ready
    tau = 0.6 if config.tau == "auto" else config.tau
    offsets, members = clusterers.resolve(config.clusterer)(
        bits, keys, dataclasses.replace(config, tau=tau)
    )
    medoids = None
    if way.selector == "medoid":
        medoids = build(
            plain.codebook, keys, offsets, members, medoids=True, medoid_bits=config.medoid_bits
        ).medoids
    select = selectors.resolve(way.selector)
    for entry_bytes in ENTRY_SIZES:
        index = dataclasses.replace(
            plain.laid_out(offsets, members, medoids),
            request_cost=config.selection_request_cost(entry_bytes),
        )
        for drives in DRIVE_COUNTS:
            yield Row(
                way.name,
                drives,
                entry_bytes,
                replay.evaluate(
                    layer,
                    offsets,
                    members,
                    lambda query, index=index: select(query, index, layer.settings.budget, config),
                    entry_bytes=entry_bytes,
                    drives=(PM9A3,) * drives,
                    placement=config.placement,
                    router=config.router,
                    index_bytes=index_bytes(index),
                ),
            )


def plain_codes(layer: LayerTrace, bytes_wanted: float) -> tuple[Callable[[Any], Any], int]:
    """faiss product quantisation of every key, of about `bytes_wanted` per entry.

    Returns:
        Attention by codes of a scaled query, and bytes held.
    """
    keys = layer.keys.float()
    heads, entries, dim = keys.shape

    def size(parts: int) -> int:
        return heads * (parts * entries + 256 * dim * 2)  # centroids in 16 bits

    options = [parts for parts in range(1, dim + 1) if dim % parts == 0]
    parts = min(options, key=lambda p: abs(size(p) / entries - bytes_wanted))
    approximate = torch.empty_like(keys)
    for head in range(heads):
        rows = np.ascontiguousarray(keys[head].numpy())
        quantizer = faiss.ProductQuantizer(dim, parts, 8)
        quantizer.cp.min_points_per_centroid = 1  # faiss would warn of short contexts
        quantizer.train(rows)
        approximate[head] = torch.from_numpy(quantizer.decode(quantizer.compute_codes(rows)))
    return lambda query: ops.score_clusters(query, approximate, 1.0), size(parts)


def by_tokens(layer: LayerTrace, score: Callable[[Any], Any], held: int) -> Iterator[Row]:
    """The baseline: tokens chosen one by one by plain codes, in token order."""
    budget = layer.settings.budget
    for entry_bytes in ENTRY_SIZES:
        for drives in DRIVE_COUNTS:
            yield Row(
                BASELINE,
                drives,
                entry_bytes,
                replay.evaluate_tokens(
                    layer,
                    lambda query: torch.topk(score(query), budget, sorted=False).indices,
                    entry_bytes=entry_bytes,
                    drives=(PM9A3,) * drives,
                    index_bytes=held,
                ),
            )


def by_tokens_and_gaps(
    layer: LayerTrace, plain: Index, score: Callable[[Any], Any], held: int
) -> Iterator[Row]:
    """Tokens one by one again, but what lies in the gaps that are read over is attended too.

    By plain codes, and by those of the default: how much of its gain is which.
    """

    def choose(probabilities: Callable[[Any], Any], cost: float, query: Any) -> torch.Tensor:
        chosen = torch.topk(probabilities(query), layer.settings.budget, sorted=False).indices
        return with_gaps(chosen, cost)

    for name, probabilities, size in (
        ("plain codes", score, held),
        ("the default's codes", plain.probabilities, plain.nbytes()),
    ):
        for entry_bytes in ENTRY_SIZES:
            cost = PM9A3.request_cost(entry_bytes)
            yield Row(
                f"tokens and the gaps read over, by {name}",
                1,
                entry_bytes,
                replay.evaluate_tokens(
                    layer,
                    functools.partial(choose, probabilities, cost),
                    entry_bytes=entry_bytes,
                    index_bytes=size,
                ),
            )


def with_gaps(entries: torch.Tensor, cost: float) -> torch.Tensor:
    """The entries, and those between two of them where that is no more than `cost`."""
    ordered = entries.sort().values
    steps = ordered.diff()
    sizes = torch.cat([torch.where(steps - 1 <= cost, steps, 1), steps.new_ones(1)])
    behind = sizes.cumsum(0) - sizes
    return torch.arange(int(sizes.sum())) + (ordered - behind).repeat_interleave(sizes)


def by_pages(layer: LayerTrace, page: int, representatives: str) -> Iterator[Row]:
    """Quest: pages ranked by the bound of their keys. InfLLM: by a few keys that stand out."""
    settings = layer.settings
    keys = layer.keys.float()
    heads, entries, _ = keys.shape
    offsets, members = sequence_blocks(entries, page)
    padded = torch.nn.functional.pad(keys, (0, 0, 0, -entries % page))
    pages = padded.unflatten(1, (-1, page))
    per_head = layer.q.shape[0] // heads
    if representatives == "bounds":
        whole = keys.split(page, 1)  # the last page may be shorter
        top = torch.stack([part.amax(1) for part in whole], 1).repeat_interleave(per_head, 0)
        bottom = torch.stack([part.amin(1) for part in whole], 1).repeat_interleave(per_head, 0)

        def score(query: torch.Tensor) -> torch.Tensor:
            bound = top @ query.clamp(min=0).mT + bottom @ query.clamp(max=0).mT
            return bound[..., 0].softmax(-1).mean(0)

        held = 2 * top.shape[1] * heads * keys.shape[2] * 2
    else:
        profile = layer.q[:, settings.context - 1024 : settings.context].float() * layer.scale
        local = profile.unflatten(0, (heads, -1)).mean((1, 2))
        strength = torch.einsum("hd,hpnd->pn", local, pages)
        chosen = strength.topk(4, dim=1).indices
        stand = pages[:, torch.arange(pages.shape[1])[:, None], chosen].mean(2)
        stand = stand.repeat_interleave(per_head, 0)

        def score(query: torch.Tensor) -> torch.Tensor:
            return (stand @ query.mT)[..., 0].softmax(-1).mean(0)

        held = 4 * pages.shape[1] * heads * keys.shape[2] * 2
    none = torch.empty(0, dtype=torch.int64)
    name = f"Quest, pages of {page}" if representatives == "bounds" else f"InfLLM, blocks of {page}"
    for entry_bytes in ENTRY_SIZES:
        for drives in DRIVE_COUNTS:
            yield Row(
                name,
                drives,
                entry_bytes,
                replay.evaluate(
                    layer,
                    offsets,
                    members,
                    lambda query: (
                        torch.topk(score(query), max(1, settings.budget // page)).indices,
                        none,
                    ),
                    entry_bytes=entry_bytes,
                    drives=(PM9A3,) * drives,
                    index_bytes=held,
                ),
            )
