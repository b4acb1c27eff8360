"""Where entries go that leave the window: strategies, parts, and what is observed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from swarm_kv import maintenance, rewrite
from swarm_kv.config import SwarmConfig
from swarm_kv.errors import ArgumentError
from swarm_kv.maintenance import Activity, Drift, Lot, RecentQueries, parts

CONFIG = SwarmConfig(paths=["/a"], max_size=6, block=4, max_replicas=2, tau_online=0.6)


def lot(**changes: Any) -> Lot:
    """Ten entries and three clusters whose medoids are active in the first, second and third four
    of twelve steps; entry i is active when cluster i % 3 is."""
    keys = torch.randn(2, 10, 8, generator=torch.Generator().manual_seed(0))
    active = torch.tensor([[0b1111], [0b1111 << 4], [0b1111 << 8]])
    given = {
        "keys": keys,
        "bits": active[torch.arange(10) % 3],
        "cluster_bits": active,
        "steps": 12,
        "sizes": torch.tensor([3, 1, 2]),
        "medoid_keys": lambda: keys[:, [7, 8, 9]],
    }
    return Lot(**{**given, **changes})


def homes_of(rows: torch.Tensor, homes: torch.Tensor) -> list[list[int]]:
    return [homes[a:b].tolist() for a, b in itertools.pairwise(rows)]


def lists_of(offsets: torch.Tensor, members: torch.Tensor) -> list[list[int]]:
    return [members[a:b].tolist() for a, b in itertools.pairwise(offsets)]


# ---- strategies


@pytest.mark.parametrize("name", maintenance.names())
def test_every_strategy_places_every_entry_and_repeats_itself(name: str) -> None:
    chosen = maintenance.resolve(name)
    rows, homes = chosen(lot(), CONFIG)
    assert rows.tolist() == sorted(rows.tolist())
    assert (rows[0], rows[-1], len(rows)) == (0, len(homes), 11)
    assert ((homes >= 0) & (homes < 3)).all()
    assert homes_of(*chosen(lot(), CONFIG)) == homes_of(rows, homes)
    offsets, members, owner = parts(rows, homes, lot().sizes, CONFIG)
    assert set(members.tolist()) == set(range(10))
    assert len(owner) == len(offsets) - 1
    assert (offsets.diff() > 0).all()


@pytest.mark.parametrize("name", maintenance.names())
def test_no_cluster_to_join(name: str) -> None:
    none = lot(
        cluster_bits=torch.zeros(0, 1, dtype=torch.int64),
        sizes=torch.zeros(0, dtype=torch.int64),
        medoid_keys=lambda: torch.zeros(2, 0, 8),
    )
    assert homes_of(*maintenance.resolve(name)(none, CONFIG)) == [[]] * 10


def test_swarm_joins_what_was_active_together() -> None:
    assert homes_of(*maintenance.swarm(lot(), CONFIG)) == [[i % 3] for i in range(10)]
    # A control: other bits, other homes.
    other = lot(bits=lot().bits.flip(0))
    assert homes_of(*maintenance.swarm(other, CONFIG)) == [[i % 3] for i in range(9, -1, -1)]
    # Nothing observed, nowhere to go.
    for blind in (lot(bits=None), lot(steps=0), lot(bits=torch.zeros(10, 1, dtype=torch.int64))):
        assert homes_of(*maintenance.swarm(blind, CONFIG)) == [[]] * 10


def test_the_controls_of_the_paper() -> None:
    assert homes_of(*maintenance.min_size(lot(), CONFIG))[:4] == [[1], [1], [2], [0]]
    homes = homes_of(*maintenance.min_diff(lot(), CONFIG))
    assert homes[7:] == [[0], [1], [2]]  # their own keys are the medoids'
    assert homes_of(*maintenance.sequence(lot(), CONFIG)) == [[]] * 10


def test_names_and_functions() -> None:
    assert maintenance.names() == ["min_diff", "min_size", "sequence", "swarm"]
    assert maintenance.resolve(maintenance.min_size) is maintenance.min_size
    with pytest.raises(ArgumentError, match=r"unknown `maintenance` \('best'\).*'min_diff'"):
        maintenance.resolve("best")
    assert maintenance.needs_bits(maintenance.swarm)
    assert maintenance.needs_bits(lambda lot, config: None)
    assert not maintenance.needs_bits(maintenance.sequence)


# ---- parts


def test_parts_lie_together_in_the_order_of_their_clusters() -> None:
    rows, homes = torch.tensor([0, 1, 3, 3, 4, 5]), torch.tensor([2, 0, 2, 1, 2])
    offsets, members, owner = parts(rows, homes, torch.tensor([1, 1, 1]), CONFIG)
    assert lists_of(offsets, members) == [[1], [3], [0, 1, 4], [2]]
    assert owner.tolist() == [0, 1, 2, -1]


def test_a_part_beyond_the_cap_splits_off() -> None:
    rows, homes = torch.arange(9), torch.tensor([0, 0, 0, 0, 0, 0, 0, 1])
    offsets, members, owner = parts(rows, homes, torch.tensor([3, 5]), CONFIG)
    assert lists_of(offsets, members) == [[0, 1, 2, 3, 4, 5], [6], [7]]
    assert owner.tolist() == [-1, -1, 1]  # 5 + 1 is the cap, 3 + 7 beyond it


def test_entries_without_a_home_are_blocks() -> None:
    offsets, members, owner = parts(*maintenance.sequence(lot(), CONFIG), lot().sizes, CONFIG)
    assert lists_of(offsets, members) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert owner.tolist() == [-1, -1, -1]


def test_an_entry_named_twice_is_in_a_part_once() -> None:
    rows, homes = torch.tensor([0, 3]), torch.tensor([1, 1, 0])
    offsets, members, _ = parts(rows, homes, torch.tensor([1, 1]), CONFIG)
    assert lists_of(offsets, members) == [[0], [0]]


# ---- observation


def test_activity_is_a_ring() -> None:
    """Against a list of columns, over several turns of the ring."""
    activity = Activity(100)
    assert activity.length == 128
    generator = torch.Generator().manual_seed(0)
    activity.replace(0, 0, 5)
    activity.resize(3)
    columns = []
    for step in range(300):
        entries, clusters = (torch.rand(n, generator=generator) < 0.4 for n in (3, 5))
        activity.note(entries, clusters)
        columns.append(clusters)
        assert activity.steps == min(step + 1, 128)
    counted = torch.stack(columns[-128:]).sum(0)
    bits = ((activity.clusters[:, :, None] >> torch.arange(64)) & 1).sum((1, 2))
    assert torch.equal(bits, counted)
    assert not torch.equal(bits, torch.stack(columns).sum(0))


def test_activity_follows_the_window() -> None:
    activity = Activity(64)
    activity.resize(4)
    activity.note(torch.tensor([True, False, True, True]), torch.zeros(0, dtype=torch.bool))
    activity.resize(6)
    assert activity.entries[:, 0].tolist() == [1, 0, 1, 1, 0, 0]
    activity.resize(4, 2)  # two have left
    assert activity.entries[:, 0].tolist() == [1, 1, 0, 0]
    activity.resize(1)  # a crop
    assert activity.entries[:, 0].tolist() == [1]
    copy = activity.copy()
    copy.note(torch.ones(1, dtype=torch.bool), torch.zeros(0, dtype=torch.bool))
    assert (activity.entries.tolist(), copy.entries.tolist()) == ([[1]], [[3]])


def test_clusters_that_are_replaced_are_unknown() -> None:
    activity = Activity(64)
    activity.replace(0, 0, 4)
    activity.note(torch.zeros(0, dtype=torch.bool), torch.ones(4, dtype=torch.bool))
    activity.replace(1, 3, 1)
    assert activity.clusters[:, 0].tolist() == [1, 0, 1]


def test_newer_window_entries_do_not_set_the_measure() -> None:
    keys = torch.zeros(1, 8, 4)
    keys[0, :, 0] = torch.tensor([1.0, 4.0, 2.0, 0.0, 9.0, 3.0, 9.0, 9.0])
    query = torch.zeros(2, 1, 4)
    query[..., 0] = 1
    active = maintenance.active_in_window(query, keys, 0.25)
    # As strong as the best of the older four.
    assert active.tolist() == [False, True, False, False, True, False, True, True]
    assert maintenance.active_in_window(query, keys, 0.5).sum() == 6
    assert maintenance.active_in_window(query, keys[:, :0], 0.5).shape == (0,)


def test_recent_queries_are_spread_over_the_last_steps() -> None:
    recent = RecentQueries(256)
    assert recent.queries(9) is None
    for step in range(1000):
        assert recent.full == (step > 252)
        if recent.due():
            recent.note(torch.full((3, 2), float(step)), step)
    queries = recent.queries(5000)
    assert queries is not None
    assert queries.q.shape == (3, 64, 2)
    assert queries.q[0, :, 0].tolist() == list(range(744, 1000, 4))
    assert queries.positions.tolist() == [5000] * 64
    copy = recent.copy()
    recent.crop(800)
    assert (len(recent), len(copy)) == (15, 64)  # those after 744, 748, .. 800 entries
    recent.clear()
    assert not recent.full


def test_drift_is_a_clear_fall() -> None:
    drift = Drift()
    assert not any(drift.note(mass) for mass in [0.9] * 4 + [0.88, 0.85, 0.9, 0.83, 0.84])
    assert not drift.note(0.7)
    assert drift.copy().note(0.7)
    assert not drift.note(0.9)


# ---- merging


@pytest.mark.parametrize(
    ("sizes", "first"),
    [
        ([5000], None),
        ([5000, 64], None),
        ([5000] + 7 * [64], None),
        ([5000] + 8 * [64], 1),
        ([5000, 512] + 7 * [64], None),
        ([5000, 512] + 8 * [64], 1),
        ([5000, 1024] + 8 * [64], 2),
        ([5000, 1024, 512] + 8 * [64], 1),
        ([64] + 8 * [64], 1),  # the first stays what the prefill made of it
        ([5000, 1000], None),
    ],
)
def test_when_segments_are_merged(sizes: list[int], first: int | None) -> None:
    assert rewrite.due(sizes) == first


def test_merging_keeps_segments_few_and_writes_few() -> None:
    sizes, written = [6144], 0
    for _ in range(1000):
        sizes.append(64)
        written += 64
        first = rewrite.due(sizes)
        if first is not None:
            sizes[first:] = [sum(sizes[first:])]
            written += sizes[-1]
    assert len(sizes) <= 1 + 7 + 8
    assert written <= 64000 * 8


def test_parts_of_a_cluster_come_together() -> None:
    offsets = torch.tensor([0, 2, 4, 5, 7, 8]).int()
    members = torch.tensor([0, 1, 2, 3, 4, 5, 1, 6, 7]).int()  # 7 is loose
    # Cluster 3 (entries 5, 1) is a part of 0; 1 and 4 are parts of clusters elsewhere.
    owner = torch.tensor([0, -1 - 9, 2, 0, -1 - 4])
    merged = rewrite.by_owner(offsets, members, owner)
    assert lists_of(*merged[:2]) == [[6], [2, 3], [0, 1, 5], [4]]
    assert merged[1].tolist()[-1] == 7
    assert merged[2].tolist() == [-1 - 4, -1 - 9, 2, 3]
