"""The benchmark `kernels`: what it makes of the program's output, and that its pairs are equal."""

from __future__ import annotations

import torch

from benchmarks import harness, kernels


def iteration(name: str, family: int, items: float, size: float | None = None) -> dict:
    rates = {"items_per_second": items} | ({} if size is None else {"bytes_per_second": size})
    return {"run_name": name, "run_type": "iteration", "family_index": family, **rates}


def test_stages_are_related_to_a_copy_of_the_same_run(monkeypatch):
    rows = [  # as they come: interleaved
        iteration("b", 2, 1e6),
        iteration(kernels.COPY, 0, 1, 10e9),
        iteration("a", 1, 2e6, 5e9),
        iteration("a", 1, 4e6, 10e9),
        iteration(kernels.COPY, 0, 1, 10e9),
        {"run_name": "a", "run_type": "aggregate", "family_index": 1},
    ]
    monkeypatch.setattr(harness.Program, "__init__", lambda self, name, configured: None)
    monkeypatch.setattr(harness.Program, "output", lambda *arguments, **_: {"benchmarks": rows})
    report = harness.Report()
    kernels.measure_stages(kernels.Parameters(), report)
    assert [(m["name"], m["unit"], m["raw"]) for m in report.measurements] == [
        ("copy of memory, read and written", "GB/s", [10.0, 10.0]),
        ("a", "ns/entry", [500.0, 250.0]),
        ("b", "ns/entry", [1000.0]),
        ("a", "of a copy's bandwidth", [0.5, 1.0]),
    ]


def results(pair: kernels.Pair) -> list[tuple[torch.Tensor, torch.Tensor]]:
    both = [side if isinstance(side, tuple) else (side,) for side in (pair.ours(), pair.torch())]
    return list(zip(*both, strict=True))


def test_pairs_that_are_said_to_agree_do():
    same = [pair for pair in kernels.pairs(320, seed=1) if pair.same]
    assert len(same) >= 5
    for pair in same:
        for ours, other in results(pair):
            torch.testing.assert_close(ours.float(), other.float(), atol=1e-2, rtol=2e-2)
            assert other.float().std() > 1e-3  # or a constant would agree


def test_operators_are_measured_in_turn(monkeypatch):
    called = []
    pair = kernels.Pair("x / y", lambda: called.append("x"), lambda: called.append("y"), same=True)
    monkeypatch.setattr(kernels, "pairs", lambda entries, seed: [pair])
    monkeypatch.setattr(kernels, "calls_for", lambda call, seconds: 1)
    report = harness.Report()
    kernels.measure_operators(kernels.Parameters(repeats=3), report)
    assert called == list("xyyxxy")
    assert [m["name"] for m in report.measurements] == ["x / y: operator", "x / y: torch", "x / y"]
    assert all(len(m["raw"]) == 3 for m in report.measurements)
