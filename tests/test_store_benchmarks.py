"""The benchmarks that read from stand-in drives, small and without root."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch

import benchmarks.drives
from benchmarks import fig14, store
from benchmarks.drives import PM9A3, stand_in_drives
from benchmarks.fig14 import Case, Cost
from benchmarks.harness import Report, Unavailable
from swarm_kv.trace import LayerTrace, Settings, layer_trace
from tests.groups import GROUPS, Groups


@pytest.fixture
def without_fuse(monkeypatch):
    def refuse(size):
        raise Unavailable("no FUSE today")

    monkeypatch.setattr(benchmarks.drives, "simulated_drive", refuse)


def held(report: Report) -> dict[str, bool]:
    return {check["name"]: check["holds"] for check in report.checks}


def test_every_drive_gives_requests_of_the_size_asked_for(without_fuse, monkeypatch):
    monkeypatch.setattr(store, "DRIVE_BYTES", 4 << 20)
    with stand_in_drives([PM9A3] * 3, 4 << 20) as drives:
        for size, depth in store.DEPTHS.items():
            retrieval = store.Retrieval(drives, size, verify=True)
            speed = retrieval.run(2 * 3 * depth, seed=1)
            assert speed.bytes_per_second > 0
            each = [d["reads"] for d in retrieval._store.counters()["drives"]]
            # Both fetches read `depth` clusters of each drive, and nothing was joined.
            assert each == [2 * depth] * 3
            retrieval.close()


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_reads_are_compared_with_fio_where_files_stand_in(without_fuse, monkeypatch):
    monkeypatch.setattr(store, "DRIVE_BYTES", 4 << 20)
    report = Report()
    small = store.Parameters(counts=(2,), sizes=(16384,), seconds=0.01, slowdown=1.0, repeats=1)
    store.run(small, report)
    names = {m["name"] for m in report.measurements}
    assert {f"2 x 16 KiB: {way}" for way in store.WAYS} <= names
    assert {f"2 x 16 KiB, unthrottled: CPU, {way}" for way in store.WAYS} <= names
    assert "2 x 16 KiB: bytes per second, retrieval / fio" in held(report)
    # Files on one disk tell nothing about scaling.
    assert not any("8 drives / 1" in name for name in held(report))
    assert any("no FUSE today" in note for note in report.notes)


@pytest.fixture(scope="module")
def layer() -> LayerTrace:
    """Queries that want two of eight groups of entries, the groups scattered over the sequence."""
    groups = Groups(1300)
    pairs = torch.randint(GROUPS, (2, 1300), generator=groups.random)
    wanted = groups.centres[pairs].sum(0)
    settings = Settings(context=1024, window=64, sinks=4, sparsity=0.1, stride=32)
    return layer_trace(0, *groups.activity(wanted), scale=1.0, settings=settings)


CASE = Case("small", "sequential")


def test_strategies_are_compared_by_the_model_where_files_stand_in(without_fuse, layer):
    report = Report()
    batch = dataclasses.replace(CASE, name="batch", rows=2)
    fig14.compare(report, [layer], cases=(CASE, batch), steps=4, sets=("8 drives", "4 + 4 mixed"))
    measured = {m["name"]: m["median"] for m in report.measurements}
    for drives in ("8 drives", "4 + 4 mixed"):
        # Swarm reads each entry once and ends no later than any ablation.
        assert held(report)[f"{drives}, small: latency, least factor"]
        repeated = measured[f"{drives}, small, static: volume"]
        assert repeated > measured[f"{drives}, small, swarm: volume"]
    assert not any("batch" in name for name in measured)


def test_a_batch_selects_for_all_its_rows(layer):
    selected = fig14.select(layer, dataclasses.replace(CASE, rows=2), steps=2)
    assert [len(rows) for rows in selected.steps] == [2, 2]
    assert sorted(set(selected.members.tolist())) == list(range(layer.settings.entries))


def test_a_strategy_that_beats_swarm_is_told(layer):
    report = Report()
    costs = {name: Cost(2.0, 2.0, 1.0) for name in fig14.STRATEGIES}
    fig14.summarise("equal", costs, report)
    assert held(report)["equal: latency, least factor"]
    assert not held(report)["equal: latency, mean factor"]
    costs["dedup_only"] = Cost(1.9, 2.0, 1.0)
    fig14.summarise("beaten", costs, report)
    assert not held(report)["beaten: latency, least factor"]


def test_strategies_read_from_simulated_ssds(layer):
    fast = PM9A3.slower(100)
    case = dataclasses.replace(CASE, rows=2)
    selected = [fig14.select(layer, case, steps=2)]
    with stand_in_drives([fast] * 2, 16 << 20) as drives:
        if not drives.throttled:
            pytest.skip(drives.note)
        costs = {name: fig14.fetched(drives, selected, case, name) for name in ("swarm", "static")}
    # Two rows of one context overlap: what both want is read once by swarm.
    assert costs["static"].bytes > costs["swarm"].bytes
    assert costs["swarm"].seconds > costs["swarm"].bytes / (2 * fast.bytes_per_second)
