"""The figures of the paper: each runs on a tiny layer, and its goals fail where they should."""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest
import torch

import benchmarks.drives
from benchmarks import (
    fig3,
    fig4,
    fig5,
    fig12,
    fig13,
    fig16,
    fig17,
    fig18,
    fig19,
    fig20,
    harness,
    plots,
    synthetic,
    table1,
    table5,
    workload,
)
from benchmarks.decoding import decoding, prefilled
from benchmarks.drives import PM9A3, stand_in_drives
from swarm_kv import trace

CONTEXT = 448
TINY = {
    fig3: {
        "models": ("smollm2",),
        "texts": ("topics",),
        "context": CONTEXT,
        "steps": 24,
        "distances": (1, 8),
    },
    fig4: {"models": ("smollm2",), "texts": ("topics",), "context": CONTEXT, "entries": 200},
    fig5: {
        "context": CONTEXT,
        "layers": (10,),
        "taus": (0.6,),
        "steps": 2,
        "update_context": CONTEXT,
        "updates": 4,
    },
    fig12: {"context": CONTEXT, "layers": (10,), "steps": 2},
    fig13: {"context": CONTEXT, "layers": (10,), "steps": 2, "sets": ("4 drives",)},
    fig16: {
        "contexts": (256, 512, 1024),
        "batches": (1, 2),
        "entries": 1024,
        "recorded": (CONTEXT,),
        "steps": 2,
    },
    fig17: {"smollm2": (CONTEXT,), "gemma3": (), "steps": 2},
    fig18: {"context": CONTEXT, "layers": (10,), "batch": 2, "steps": 2, "drives": (1, 2)},
    fig19: {"context": CONTEXT, "taus": (0.5, 0.8), "steps": 2},
    fig20: {"context": CONTEXT, "sparsities": (0.1, 0.3), "steps": 2},
    table1: {},
}


@functools.cache
def layer(context, tests, stride=1):
    """With synthetic keys and a query for every token."""
    tokens = context + workload.WINDOW + tests * stride
    text = synthetic.context(tokens, tokens, heads=2, kv_heads=1, dim=32)
    settings = trace.Settings(context, workload.WINDOW, workload.SINKS, stride=stride)
    values = text.keys.flip(1).contiguous()
    return trace.layer_trace(
        10, text.queries, text.keys, values, scale=text.scale, settings=settings
    )


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """Files in place of drives, and a synthetic layer in place of recorded ones."""

    def recorded(
        model,
        text="topics",
        *,
        context,
        steps,
        stride=1,
        layers=None,
        follows=None,
        entry_bytes=None,
    ):
        made = layer(context, steps, stride)
        return [made if entry_bytes is None else workload.widened(made, entry_bytes)]

    def nowhere(size):
        raise harness.Unavailable("no FUSE")

    monkeypatch.setattr(workload, "recorded", recorded)
    monkeypatch.setattr(benchmarks.drives, "simulated_drive", nowhere)
    monkeypatch.setattr(table5, "Replay", functools.partial(table5.Replay, window=16))
    monkeypatch.setattr(table5, "LATER", 16)


@pytest.mark.parametrize("module", TINY, ids=lambda module: module.__name__.split(".")[-1])
def test_figure_runs_and_is_drawn(module, tmp_path):
    report = harness.Report()
    parameters = module.Parameters(**TINY[module])
    module.run(parameters, report)
    name = module.__name__.split(".")[-1]
    result = harness.result_of(name, parameters, report, quick=True)
    assert result["measurements"]
    names = [measured["name"] for measured in result["measurements"]]
    assert len(set(names)) == len(names)
    speeds = [name for name in names if name.endswith(": throughput")]
    assert all(name.replace("throughput", "recall") in names for name in speeds)
    assert all(name + " with selection" in names for name in speeds)
    assert not speeds or module is fig5 or any("cached: 0%" in note for note in report.notes)
    picture = tmp_path / "figure.svg"
    module.plot(json.loads(json.dumps(result)), picture)
    drawn = picture.read_text()
    assert drawn.count('id="axes_') >= 1
    assert module.PAPER


def test_table1_is_the_papers():
    report = harness.Report()
    table1.run(table1.Parameters(), report)
    assert len(report.checks) == 2 * len(table1.PAPER_RATIOS)
    assert all(check["holds"] for check in report.checks)


def test_table1_goals_fail_for_another_model(monkeypatch):
    monkeypatch.setattr(table1, "GPT3_BYTES_PER_TOKEN", table1.GPT3_BYTES_PER_TOKEN * 1.02)
    report = harness.Report()
    table1.run(table1.Parameters(), report)
    assert not any(check["holds"] for check in report.checks if "size" in check["name"])


def test_mass_and_overlap():
    own = layer(CONTEXT, 32)
    shares = [fig3.mass(own, share) for share in (0.05, 0.2, 1.0)]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)
    # Queries of a stay want the same topics; shuffled ones do not follow each other.
    sets = fig3.active(own)
    order = torch.randperm(len(sets), generator=torch.Generator().manual_seed(0))
    assert fig3.overlap(sets, 1) > 1.1 * fig3.overlap(sets[order], 1)


def test_chance_keeps_how_often_and_loses_what_together():
    active = torch.zeros(6, 64)
    active[:3, :16] = 1
    active[3:, 40:48] = 1
    random = torch.Generator().manual_seed(0)
    dealt = fig4.shuffled(active, random)
    assert torch.equal(dealt.sum(1), active.sum(1))
    assert fig4.closest(active).min() == 1
    assert fig4.closest(dealt).max() < 0.5
    assert sorted(fig4.conditional(active).unique().tolist()) == [0, 1]


def test_bits_are_unpacked_in_order():
    bits = torch.tensor([[-(2**63) + 1, 2]], dtype=torch.int64)
    active = fig4.unpacked(bits)
    assert active.shape == (1, 128)
    assert active[0].nonzero()[:, 0].tolist() == [0, 63, 65]


def test_replica_paths():
    random = torch.Generator().manual_seed(0)
    everywhere = torch.ones(64, 4, dtype=torch.bool)
    found = fig5.paths([everywhere], 100, random)
    assert found.worst == pytest.approx(0.25)  # all from one drive
    assert found.worst < found.least < found.median < found.most <= 1
    alone = torch.eye(4, dtype=torch.bool).repeat(16, 1)  # one copy each: one path
    found = fig5.paths([alone], 10, random)
    assert found == fig5.Paths(1, 1, 1, 1)


def points(latency):
    return [
        fig16.Point(context, latency + context * 4096 / 1e9, context * 4096.0)
        for context in (256, 1024, 4096, 16384, 65536)
    ]


def test_line_from_the_knee_on():
    report = harness.Report()
    fig16.check(report, "batch 1", points(latency=0.01))
    assert report.measurements[0]["median"] == 4096
    assert [check["holds"] for check in report.checks] == [True]


def test_no_line_where_drives_slow_down():
    bent = points(latency=0.01)
    bent[-1] = dataclasses.replace(bent[-1], seconds=2 * bent[-1].seconds)
    report = harness.Report()
    fig16.check(report, "batch 1", bent)
    assert [check["holds"] for check in report.checks] == [False]


def test_scaling_fails_when_one_drive_does_all_the_work():
    report = harness.Report()
    fig18.check(report, {1: 10.0, 8: 75.0}, 0.92, {"large steps": 0.95})
    assert all(check["holds"] for check in report.checks)
    report = harness.Report()
    fig18.check(report, {1: 10.0, 8: 10.0}, 0.97 / 8, {"large steps": 0.99 / 8})
    assert not any(check["holds"] for check in report.checks)


@pytest.mark.parametrize("used", [1, 4])
def test_what_the_plan_allows(used):
    """An even plan keeps all drives busy; on one drive of four it can use a quarter."""
    ready = prefilled(layer(CONTEXT, 4), layout="sequence", selector="codes", sparsity=1.0)
    with (
        stand_in_drives([PM9A3] * used, 16 << 20) as drives,
        decoding(ready, drives, placement="sequential") as decoder,
    ):
        (cost,) = decoder.steps(1)
    share = cost.bytes / (4 * PM9A3.bytes_per_second) / cost.busiest
    assert share == pytest.approx(used / 4, rel=0.1)


def test_only_some_rows_of_a_batch():
    own = layer(CONTEXT, 4)
    with stand_in_drives([PM9A3], 16 << 20) as drives, decoding(own, drives, batch=3) as decoder:
        one, three = (decoder.steps(1, rows=rows)[0] for rows in (1, 3))
    assert three.bytes > 2 * one.bytes


def test_panels_find_measurements_by_name():
    report = harness.Report()
    report.measure("a, 2 drives: speed", "1/s", [1.0, 3.0])
    report.measure("a, 1 drives: speed", "1/s", [float("nan")])
    report.measure("b, 1 drives: recall", "share", 1.0)
    panel = plots.Panel(r"(?P<series>.+), (?P<x>\d+) drives: speed", "drives", "speed", factor=2)
    found = plots.series_of({"measurements": report.measurements}, panel)
    assert found == {"a": [plots.Point("2", 4.0, 2.0, 6.0)]}
