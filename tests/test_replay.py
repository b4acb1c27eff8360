"""Replaying selections on traces: quality and I/O figures, checked against plain computations."""

from __future__ import annotations

import json
import math
import pathlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from swarm_kv import replay, trace, tune
from swarm_kv.errors import ArgumentError
from swarm_kv.index import sequence_blocks
from swarm_kv.replay import PM9A3, Drive, evaluate, evaluate_tokens, gap_merged

CONTEXT, SINKS, TOKENS = 300, 4, 420
ENTRIES = CONTEXT - SINKS
NONE = torch.empty(0, dtype=torch.int64)
ENTRY_BYTES = 512


@pytest.fixture(scope="module")
def recorded(tiny_model: Callable[..., Any]) -> trace.Trace:
    ids = torch.randint(3, 128, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    return trace.record(
        tiny_model("qwen3"),
        ids,
        context=CONTEXT,
        layers=[1, 3],
        window=16,
        sinks=SINKS,
        stride=8,
        dtype=torch.float32,
    )


@pytest.fixture(scope="module")
def layer(recorded: trace.Trace) -> trace.LayerTrace:
    return recorded.layers[1]


def in_blocks(**settings: Any) -> Any:
    offsets, members = sequence_blocks(ENTRIES, 16)
    return {"offsets": offsets, "members": members, "entry_bytes": ENTRY_BYTES, **settings}


def test_reading_everything_is_exact_and_reading_nothing_is_not(layer: trace.LayerTrace) -> None:
    every = evaluate(layer, **in_blocks(), select=lambda q: (torch.arange(19), NONE))
    assert every.recall == pytest.approx(1, abs=1e-5)
    assert every.err < 1e-5
    nothing = evaluate(layer, **in_blocks(), select=lambda q: (NONE, NONE))
    assert nothing.recall == 0
    assert nothing.err > 0.1
    assert (nothing.reads, nothing.bytes, nothing.seconds) == (0, 0, 0)
    # Singly or in clusters, an entry is an entry.
    singly = evaluate(layer, **in_blocks(), select=lambda q: (NONE, torch.arange(ENTRIES)))
    assert singly.recall == pytest.approx(1, abs=1e-5)


def test_recall_and_error_are_those_of_masked_attention(layer: trace.LayerTrace) -> None:
    generator = torch.Generator().manual_seed(3)
    chosen = [torch.randperm(ENTRIES, generator=generator)[:40] for _ in layer.positions]
    taken = iter(chosen)
    result = evaluate(layer, **in_blocks(), select=lambda q: (NONE, next(taken)))
    keys, values = (part.double().repeat_interleave(4, 0) for part in (layer.k, layer.v))
    recall, err, ignoring_sinks = [], [], []
    for own, entries in zip(layer.positions.tolist(), chosen, strict=True):
        scores = torch.einsum("hd,hnd->hn", layer.q[:, own].double(), keys[:, : own + 1])
        scores *= layer.scale
        probs = scores.softmax(-1)
        mass = probs.mean(0)[SINKS:CONTEXT]
        recall.append((mass[entries].sum() / mass.sum()).item())
        ignoring_sinks.append((probs.mean(0)[entries].sum() / mass.sum()).item())
        hidden = torch.ones(own + 1, dtype=torch.bool)
        hidden[:SINKS], hidden[CONTEXT:], hidden[entries + SINKS] = False, False, False
        out, part = (
            torch.einsum("hn,hnd->hd", s.softmax(-1), values[:, : own + 1])
            for s in (scores, scores.masked_fill(hidden, -math.inf))
        )
        err.append(((part - out).norm(dim=1) / out.norm(dim=1)).mean().item())
    assert result.recall == pytest.approx(sum(recall) / len(recall), rel=1e-4)
    assert result.err == pytest.approx(sum(err) / len(err), rel=1e-3)
    # Control: with entries taken for tokens the figure would be another.
    assert result.recall != pytest.approx(sum(ignoring_sinks) / len(recall), rel=1e-2)


def test_select_gets_scaled_test_queries_in_order(layer: trace.LayerTrace) -> None:
    seen: list[torch.Tensor] = []

    def select(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(query)
        return NONE, NONE

    evaluate(layer, **in_blocks(), select=select)
    assert len(seen) == len(layer.positions) == math.ceil((TOKENS - CONTEXT - 16) / 8)
    for query, own in zip(seen, layer.positions.tolist(), strict=True):
        torch.testing.assert_close(query, layer.q[:, own : own + 1] * layer.scale)


def test_io_of_chosen_clusters(layer: trace.LayerTrace) -> None:
    drive = Drive(t_base=1e-6, t_transfer=1e-9)  # a request costs 1000 bytes: gaps of one entry go
    one = {"select": lambda q: (torch.tensor([2, 6, 7]), NONE), "drives": [drive]}
    result = evaluate(layer, **in_blocks(**one))
    assert (result.reads, result.volume, result.bytes) == (2, 48, 48 * ENTRY_BYTES)
    assert result.seconds == pytest.approx(2e-6 + 48 * ENTRY_BYTES * 1e-9)
    assert result.overhead == 1
    assert result.index_bytes == (20 + ENTRIES) * 4
    assert result.index_bytes_per_entry == pytest.approx(result.index_bytes / ENTRIES)
    assert result.index_share == pytest.approx(result.index_bytes / (ENTRIES * 2 * 16 * 2))
    # Clusters that are no stretches of the sequence lie half on either drive.
    shuffled = torch.randperm(ENTRIES, generator=torch.Generator().manual_seed(1)).int()
    split = {**one, "drives": [drive] * 2, "members": shuffled}
    two = evaluate(layer, **{**in_blocks(**split), "index_bytes": 7})
    assert (two.reads, two.bytes, two.index_bytes) == (4, result.bytes, 7)
    assert two.seconds == pytest.approx(2e-6 + 24 * ENTRY_BYTES * 1e-9)


def test_replicas_count_as_overhead_and_may_join_requests(layer: trace.LayerTrace) -> None:
    offsets, members = sequence_blocks(ENTRIES, 16)
    copied = torch.tensor([200, 3], dtype=torch.int32)  # a cluster of entries that lie far apart
    doubled = {
        "offsets": torch.cat([offsets, offsets[-1:] + 2]),
        "members": torch.cat([members, copied]),
        "entry_bytes": ENTRY_BYTES,
    }
    wanted = {"select": lambda q: (torch.tensor([19]), NONE)}
    result = evaluate(layer, **doubled, **wanted)
    assert result.overhead == pytest.approx((ENTRIES + 2) / ENTRIES)
    assert (result.reads, result.volume) == (1, 2)
    apart = evaluate(layer, **in_blocks(), select=lambda q: (NONE, copied.long()))
    assert apart.reads == 2  # control: without the replicas they take a request each
    assert apart.recall == result.recall


def test_clusters_of_something_else_are_refused(layer: trace.LayerTrace) -> None:
    for count in (CONTEXT, ENTRIES - 1):
        offsets, members = sequence_blocks(count, 16)
        with pytest.raises(ArgumentError, match=f"every entry 0 to {ENTRIES - 1} of the layer"):
            evaluate(layer, offsets, members, lambda q: (NONE, NONE))


def test_gap_merging_is_the_cheapest_way_to_read_in_order() -> None:
    assert gap_merged(NONE, 1.5) == (0, 0)
    assert gap_merged(torch.tensor([7, 3, 4]), 1.5) == (2, 3)
    assert gap_merged(torch.tensor([7, 3, 4]), 2) == (1, 5)
    draw = random.Random(0)
    for _ in range(50):
        wanted = sorted(draw.sample(range(30), 7))
        cost = draw.choice([0.5, 1.0, 1.5, 3.0, 6.0])
        requests, volume = gap_merged(torch.tensor(wanted), cost)
        best = math.inf
        for cuts in range(2**6):  # any way to part the list into runs
            runs, start = [], 0
            for i in range(6):
                if cuts >> i & 1:
                    runs.append((wanted[start], wanted[i]))
                    start = i + 1
            runs.append((wanted[start], wanted[6]))
            best = min(best, len(runs) * cost + sum(b - a + 1 for a, b in runs))
        assert requests * cost + volume == pytest.approx(best)


def test_tokens_in_order_are_the_baseline(layer: trace.LayerTrace) -> None:
    taken = iter(layer.selections.long())
    oracle = evaluate_tokens(layer, lambda q: next(taken), entry_bytes=4096)
    for row in layer.selections.long():
        assert len(row) == layer.settings.budget == 30
    counts = [gap_merged(row, 1.5) for row in layer.selections]
    assert oracle.reads == pytest.approx(sum(r for r, _ in counts) / len(counts))
    assert oracle.volume == pytest.approx(sum(v for _, v in counts) / len(counts))
    seconds = oracle.reads * PM9A3.t_base + oracle.bytes * PM9A3.t_transfer
    assert oracle.seconds == pytest.approx(seconds)
    # No other choice of as many entries holds more, certainly not this one.
    fixed = evaluate_tokens(layer, lambda q: torch.arange(30), entry_bytes=4096)
    assert fixed.recall < 0.7 * oracle.recall
    assert fixed.reads == 1
    several = evaluate_tokens(
        layer, lambda q: torch.arange(30), entry_bytes=4096, drives=[PM9A3] * 3
    )
    assert several.reads == 3
    assert several.seconds == pytest.approx(0.9e-6 + 10 * 4096 / 6.9e9)


def test_a_request_of_a_pm9a3_costs_one_and_a_half_pages() -> None:
    assert PM9A3.request_cost(4096) == pytest.approx(1.5, abs=0.02)
    assert PM9A3.request_cost(1024) == pytest.approx(6, abs=0.1)


def test_mean_over_layers(layer: trace.LayerTrace) -> None:
    every = evaluate(layer, **in_blocks(), select=lambda q: (torch.arange(19), NONE))
    nothing = evaluate(layer, **in_blocks(), select=lambda q: (NONE, NONE))
    both = replay.mean([every, nothing])
    assert both.recall == pytest.approx(0.5, abs=1e-5)
    assert both.reads == every.reads / 2
    assert both.index_bytes == 2 * every.index_bytes
    assert both.index_share == every.index_share
    with pytest.raises(ArgumentError, match="at least one layer"):
        replay.mean([])


def test_a_sweep_tries_every_pair_on_every_layer(recorded: trace.Trace) -> None:
    steps: list[None] = []
    points = tune.sweep(
        recorded,
        [0.3, 0.8],
        [1, 32],
        min_activation=2,
        code_bytes=4,
        entry_bytes=ENTRY_BYTES,
        on_point=lambda: steps.append(None),
    )
    assert [(p.tau, p.max_size) for p in points] == [(0.3, 1), (0.3, 32), (0.8, 1), (0.8, 32)]
    assert len(steps) == 8
    by_setting = {(p.tau, p.max_size): p for p in points}
    for p in points:
        assert set(p.layers) == {1, 3}
        for number, one in p.layers.items():
            taken = iter(recorded.layers[number].selections.long())
            best = evaluate_tokens(recorded.layers[number], lambda q, taken=taken: next(taken))
            assert 0.5 * best.recall < one.recall
        assert p.mean.overhead <= 3
        json.dumps(p.to_dict())
    assert by_setting[0.3, 1].mean.overhead == 1  # clusters of one have no replicas
    assert by_setting[0.8, 32].mean.overhead > 1
    assert by_setting[0.8, 32].mean.reads < by_setting[0.3, 1].mean.reads
    with pytest.raises(ArgumentError, match="at least one `tau`"):
        tune.sweep(recorded, [], [16])
    whole = r"10 parts of `code_bits` \(4\), which must divide the head size"
    with pytest.raises(ArgumentError, match=whole):
        tune.sweep(recorded, [0.5], [16], code_bytes=5)
    with pytest.raises(ArgumentError, match="tau"):
        tune.sweep(recorded, [1.5], [16])


def test_a_plot_is_drawn(recorded: trace.Trace, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    points = tune.sweep(recorded, [0.3, 0.6], [8], entry_bytes=ENTRY_BYTES)
    tune.plot(points, "tiny", tmp_path / "sweep.svg")
    text = (tmp_path / "sweep.svg").read_text()
    assert text.count("<!-- τ 0.3 -->") == text.count("<!-- τ 0.6 -->") == 2
    with pytest.raises(ArgumentError, match="cannot draw"):
        tune.plot(points, "tiny", tmp_path / "sweep.doc")
