"""The benchmarks of the offline stage, small: they run, and tell good from bad."""

from __future__ import annotations

import pytest
import torch

from benchmarks import harness, scale, synthetic, table4
from benchmarks import pareto as replays
from benchmarks.harness import Report
from swarm_kv import ops
from swarm_kv.trace import LayerTrace, Settings, layer_trace


@pytest.fixture(scope="module")
def layer() -> LayerTrace:
    """Eight groups of entries that are wanted together, scattered over the sequence."""
    random = torch.Generator().manual_seed(2)
    tokens, dim, groups = 1300, 32, 8
    centres = torch.nn.functional.normalize(torch.randn(groups, dim, generator=random), dim=-1)
    group = torch.randint(groups, (tokens,), generator=random)
    noise = torch.randn(1, tokens, dim, generator=random) * 0.15
    k = centres[group][None] + noise
    wanted = centres[torch.randint(groups, (tokens,), generator=random)]
    q = 12 * wanted[None].repeat(2, 1, 1) + torch.randn(2, tokens, dim, generator=random)
    v = torch.randn(1, tokens, dim, generator=random)
    settings = Settings(context=1024, window=64, sinks=4, sparsity=0.1, stride=32)
    return layer_trace(0, q, k, v, scale=1.0, settings=settings)


def test_every_way_is_evaluated_and_the_default_reads_less(layer: LayerTrace) -> None:
    table: dict[tuple[str, int, int], list[replays.Evaluation]] = {}
    for row in replays.every_way(layer):
        table.setdefault((row.way, row.drives, row.entry_bytes), []).append(row.result)
    assert {name for name, _, _ in table} >= {way.name for way in replays.WAYS}
    report = Report()
    replays.summarise(table, report)
    held = {check["name"]: check for check in report.checks}
    time = held[f"{replays.DEFAULT}; 1 drives, 4096 B: I/O time / {replays.BASELINE}"]
    assert time["holds"]
    assert len(held) == 6
    # Control: pages cannot hold groups that are scattered.
    default = table[(replays.DEFAULT, 1, 4096)][0]
    assert table[("Quest, pages of 16", 1, 4096)][0].recall < 0.7 * default.recall


def test_gaps_are_filled_up_to_their_cost() -> None:
    entries = torch.tensor([9, 2, 3, 6, 20])
    assert replays.with_gaps(entries, 2.0).tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 20]
    assert replays.with_gaps(entries, 1.5).tolist() == [2, 3, 6, 9, 20]


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
