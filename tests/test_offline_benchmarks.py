"""The benchmarks of the offline stage, small: they run, and tell good from bad."""

from __future__ import annotations

import pytest
import torch

from benchmarks import harness, pareto, scale, synthetic, table4
from benchmarks.harness import Report
from swarm_kv import ops
from swarm_kv.trace import LayerTrace, Settings, layer_trace
from tests.groups import GROUPS, Groups


@pytest.fixture(scope="module")
def layer() -> LayerTrace:
    """Eight groups of entries that are wanted together, scattered over the sequence."""
    groups = Groups(1300)
    wanted = groups.centres[torch.randint(GROUPS, (1300,), generator=groups.random)]
    settings = Settings(context=1024, window=64, sinks=4, sparsity=0.1, stride=32)
    return layer_trace(0, *groups.activity(wanted), scale=1.0, settings=settings)


def test_the_front_tells_a_default_that_is_beaten() -> None:
    def curve(*recalls: float) -> list[pareto.Point]:
        return [pareto.Point(1e-6 * 2**i, recall, 0.0) for i, recall in enumerate(recalls)]

    curves = {
        pareto.DEFAULT: curve(0.5, 0.7, 0.9),
        "codes": curve(0.4, 0.6, 0.8),
        pareto.CEILING: curve(0.9, 0.95, 1.0),
    }
    report = Report()
    pareto.check_front("x", curves, (0.1, 0.2, 0.3), report)
    assert [check["holds"] for check in report.checks] == [True] * 3
    curves["codes"] = curve(0.4, 0.8, 0.8)
    report = Report()
    pareto.check_front("x", curves, (0.1, 0.2, 0.3), report)
    assert [check["holds"] for check in report.checks] == [True, False, True]


def test_recall_between_budgets_is_in_proportion_to_log_time() -> None:
    curve = [pareto.Point(seconds, recall, 0.0) for seconds, recall in ((1.0, 0.2), (4.0, 0.6))]
    assert pareto.recall_at(curve, 2.0) == pytest.approx(0.4)
    assert pareto.recall_at(curve, 9.0) == pytest.approx(0.6)
    assert pareto.recall_at(curve, 0.5) is None


def test_every_selector_is_on_the_plane(layer: LayerTrace, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(pareto, "layers_of", lambda parameters: [layer])
    monkeypatch.setattr(pareto, "ENTRY_SIZES", (4096,))
    parameters = pareto.Parameters(budgets=(0.05, 0.2), steps=2)
    report = Report()
    pareto.run(parameters, report)
    medians = {m["name"]: m["median"] for m in report.measurements}
    for way in (*pareto.SELECTORS, *pareto.VARIANTS):
        assert medians[f"4 KiB, {way}, 20%: recall"] >= medians[f"4 KiB, {way}, 5%: recall"]
    # Pages cannot hold groups that are scattered, and a codec reads less for the same.
    default = f"4 KiB, {pareto.DEFAULT}, 20%"
    assert medians["4 KiB, quest, 20%: recall"] < 0.8 * medians[f"{default}: recall"]
    assert medians["4 KiB, default, int8, 20%: I/O"] < 0.7 * medians[f"{default}: I/O"]
    result = harness.result_of("pareto", parameters, report, quick=True)
    pareto.plot(result, tmp_path / "front.png")
    assert (tmp_path / "front.png").stat().st_size > 10_000


def test_scale_measures_time_and_memory_in_a_process_of_its_own() -> None:
    row = scale.measure_apart(8192, 256)
    assert row["signature_bytes"] == 8192 * 32
    assert row["peak_bytes"] > row["signature_bytes"]
    assert row["signatures_s"] > 0
    assert row["clusters"] > 0


def test_synthetic_entries_are_activated_together() -> None:
    context = synthetic.context(6144, 256, heads=4, kv_heads=2, dim=64)
    bits = ops.activation_signatures(
        context.queries, context.keys, context.positions, 0.1, 256, 4, context.scale
    )
    offsets, members = ops.cluster(bits, min_activation=4)
    random = torch.Generator().manual_seed(1)
    chance = [torch.randint(2**62, bits.shape, generator=random) for _ in range(3)]
    control = ops.cluster(chance[0] & chance[1] & chance[2], min_activation=4)
    assert len(torch.unique(members)) == 6144
    assert len(offsets) > 100
    assert len(control[0]) == 1  # no cluster: nothing goes together by chance


def test_selection_times_every_way() -> None:
    (row,) = table4.rows((4096,), repeats=2, seed=0)
    assert set(row["seconds"]) == set(row["index_bytes"])
    assert all(len(times) == 2 and min(times) > 0 for times in row["seconds"].values())
    assert row["index_bytes"]["medoids of 4 bits"] < row["index_bytes"]["medoids"]


def test_selection_is_checked_against_the_paper() -> None:
    report = Report()
    parameters = table4.Parameters(lengths=(4096,), repeats=1)
    table4.run(parameters, report)
    assert {check["name"].split(":")[0] for check in report.checks} == {"4096 entries"}
    harness.validate(harness.result_of("table4", parameters, report, quick=True))
