"""The benchmark `fig15`, small: it runs, and tells good from bad."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks import fig15
from benchmarks.harness import Report
from swarm_kv.trace import LayerTrace, Settings, layer_trace
from tests.groups import GROUPS, Groups

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def layer() -> LayerTrace:
    """Queries that look for one of eight groups of entries and change slowly."""
    groups = Groups(1300)
    topics = torch.randint(GROUPS, (1300 // 20 + 1,), generator=groups.random)
    wanted = groups.centres[topics.repeat_interleave(20)[:1300]]
    settings = Settings(context=1024, window=64, sinks=4, sparsity=0.1, stride=1)
    return layer_trace(0, *groups.activity(wanted), scale=1.0, settings=settings)


def test_every_policy_is_compared_and_goals_are_checked(layer: LayerTrace) -> None:
    report = Report()
    rows = fig15.compare([layer], report, latency_steps=8, drives=2)
    assert {row.policy for row in rows} == {*fig15.POLICIES, fig15.TEXTBOOK}
    missed = {(row.selection, row.policy, row.ratio): row.missed for row in rows}
    for policy in fig15.POLICIES:
        curve = [missed["exact", policy, ratio] for ratio in fig15.RATIOS]
        assert curve[0] > curve[2] > curve[-1], policy
    assert missed["exact", fig15.TEXTBOOK, 0.05] > missed["exact", "lru", 0.05]
    goals = [check for check in report.checks if "bytes read" in check["name"]]
    assert len(goals) == 2 * len(fig15.GOALS)
    names = {measurement["name"] for measurement in report.measurements}
    assert "cache 25%, decayed_frequency: I/O time per layer and step" in names
    assert "size worth having, by the meter" in names


def test_steps_in_no_order_are_served_worse(layer: LayerTrace) -> None:
    steps = fig15.steps_of(layer)["exact"]
    lists = list(steps.lists())
    shuffled = [lists[i] for i in torch.randperm(len(lists)).tolist()]
    apart = dataclasses.replace(steps, wanted=torch.cat(shuffled))
    kept = fig15.row_of(steps, "exact", "lru", 0.15)
    assert kept.missed < 0.7 * fig15.row_of(apart, "exact", "lru", 0.15).missed
    assert kept.read >= kept.missed
