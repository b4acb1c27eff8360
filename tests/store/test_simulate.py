"""Simulated reads against the reference and against real fetches."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from swarm_kv import reference
from swarm_kv.errors import ArgumentError
from swarm_kv.simulate import simulate_reads

from .helpers import Data, fetch_all, open_store, overlapping, pack

pytestmark = pytest.mark.timeout(120)

PLACEMENTS = ("round_robin", "fixed_start", "sequential", "weighted")
ROUTERS = ("swarm", "static", "dedup_only", "balance_only")


def ragged(lists: list[list[int]]) -> tuple[Tensor, Tensor]:
    offsets, values = pack(lists)
    return values.long(), offsets.long()


def layout(
    clustered: int, loose: int, seed: int, stretches: int = 0
) -> tuple[list[list[int]], list[int], int]:
    """Random clusters, some stretches of the sequence behind them, and loose entries."""
    clusters = overlapping(clustered, seed)
    first = clustered
    for size in random.Random(seed).choices([2, 16, 40], k=stretches):
        clusters.append([*range(first, first + size)])
        first += size
    return clusters, [*range(first, first + loose)], first + loose


def steps_of(clusters: int, entries: int, count: int, seed: int) -> list[tuple[list[int], ...]]:
    rng = random.Random(seed)
    return [
        (rng.choices(range(clusters), k=rng.randint(0, 9)), rng.choices(range(entries), k=20))
        for _ in range(count)
    ]


def sample(
    seed: int = 0,
    placement: str = "round_robin",
    router: str = "swarm",
    entry_bytes: int = 768,
    models: tuple[tuple[float, float], ...] = ((1e-5, 1e-9), (3e-6, 4e-9), (1e-5, 1e-9)),
) -> tuple[Any, ...]:
    clusters, loose, entries = layout(150, 90, seed, stretches=4)
    steps = steps_of(len(clusters), entries, 5, seed)
    base, transfer = torch.tensor(models, dtype=torch.float64).T
    return (
        *pack(clusters, loose),
        entries,
        entry_bytes,
        base,
        transfer,
        512,
        placement,
        router,
        *ragged([step[0] for step in steps]),
        *ragged([step[1] for step in steps]),
    )


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("entry_bytes", [100, 768, 4096, 300_000])
def test_equals_the_reference(entry_bytes: int, placement: str, router: str) -> None:
    for seed in range(3):
        args = sample(seed, placement, router, entry_bytes)
        requests, size, seconds = simulate_reads(*args)
        expected = reference.simulate_reads(*args)
        assert torch.equal(requests, expected[0])
        assert torch.equal(size, expected[1])
        torch.testing.assert_close(seconds, expected[2], rtol=1e-12, atol=0)
        assert requests.sum() > 0


def test_strategies_are_told_apart() -> None:
    """The comparison above would pass if names were ignored on both sides."""
    results = [
        simulate_reads(*sample(0, placement, router))[1].flatten().tolist()
        for placement in PLACEMENTS
        for router in ROUTERS
    ]
    assert len({tuple(result) for result in results}) == len(results)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_equals_a_real_fetch(placement: str, router: str) -> None:
    """Requests and bytes of each drive, as the store counts them; nothing is cached yet."""
    names = ["a", "b", "c"]
    model = (2e-6, 1e-9)  # cheap requests, so that gaps matter
    for seed, dim in ((0, 24), (1, 64), (2, 40)):
        clusters, loose, entries = layout(150, 90, seed, stretches=4)
        data = Data.random(entries, 2, dim)
        for chosen, single in steps_of(len(clusters), entries, 2, seed):
            store = open_store(
                names,
                engine="simulated",
                device_model=model,
                placement=placement,
                router=router,
                dram_bytes="32MiB",
                staging_bytes="12MiB",
            )
            segment = data.write(store, pack(clusters, loose))
            fetch_all(store, segment, data, torch.tensor(chosen).long(), torch.tensor(single))
            drives = store.counters()["drives"]
            requests, size, seconds = simulate_reads(
                *pack(clusters, loose),
                entries,
                data.entry_bytes,
                torch.full((3,), model[0], dtype=torch.float64),
                torch.full((3,), model[1], dtype=torch.float64),
                drives[0]["block"],
                placement,
                router,
                *ragged([chosen]),
                *ragged([single]),
            )
            assert requests[0].tolist() == [drive["decode_requests"] for drive in drives]
            assert size[0].tolist() == [drive["decode_bytes"] for drive in drives]
            worst = max(
                drive["decode_requests"] * model[0] + drive["decode_bytes"] * model[1]
                for drive in drives
            )
            assert seconds.item() == pytest.approx(worst, rel=1e-12)
            store.close()


def test_loose_neighbours_are_one_request() -> None:
    def requests(wanted: list[int]) -> int:
        entries = 256
        counted, _, _ = simulate_reads(
            *pack([], range(entries)),
            entries,
            512,
            torch.full((4,), 1e-7, dtype=torch.float64),
            torch.full((4,), 1e-9, dtype=torch.float64),
            512,
            "round_robin",
            "swarm",
            *ragged([[]]),
            *ragged([wanted]),
        )
        return int(counted.sum())

    assert requests([*range(32, 48)]) == 1
    assert requests([*range(256)]) == 4
    assert requests([*range(0, 256, 16)]) == 16


def test_no_steps_and_empty_steps() -> None:
    args = list(sample())
    nothing = torch.empty(0, dtype=torch.int64)
    for rows, steps in ((torch.tensor([0]), 0), (torch.tensor([0, 0, 0]), 2)):
        args[9:] = nothing, rows, nothing, rows
        requests, size, seconds = simulate_reads(*args)
        assert requests.shape == size.shape == (steps, 3)
        assert seconds.tolist() == [0.0] * steps
        assert not requests.any()


def test_opcheck_and_fake_shapes() -> None:
    args = sample()
    torch.library.opcheck(torch.ops.swarm_kv.simulate_reads.default, args)
    real = simulate_reads(*args)
    with FakeTensorMode(allow_non_fake_inputs=True):
        traced = simulate_reads(*args)
        with pytest.raises(RuntimeError, match="5 steps of clusters, 4 of entries"):
            simulate_reads(*args[:-1], args[-1][:-1])
    assert [(t.shape, t.dtype) for t in traced] == [(t.shape, t.dtype) for t in real]


NAMES = ("offsets", "members", "entries", "entry_bytes", "t_base", "t_transfer", "block")
NAMES += ("placement", "router", "clusters", "cluster_rows", "wanted", "wanted_rows")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("offsets", torch.tensor([0, 3]), "offsets must be int32, got int64 [2]"),
        ("entries", 10_000, "is in no cluster and not loose"),
        ("entry_bytes", 0, "`entry_bytes` must be in [1, 2^31), got 0"),
        ("t_base", torch.ones(2, dtype=torch.float64), "has 2 drives but `t_transfer` has 3"),
        ("t_base", torch.zeros(3, dtype=torch.float64), "drive 0 needs positive, finite seconds"),
        ("t_base", torch.ones(3), "t_base must be float64, got float32 [3]"),
        ("block", 1000, "`block` must be a power of two of at most 2^30, got 1000"),
        ("placement", "fast", 'unknown `placement` "fast"; choose one of: round_robin'),
        ("router", "fast", 'unknown `router` "fast"; choose one of: swarm, static'),
        ("cluster_rows", torch.tensor([0, 1]), "`cluster_rows` must run from 0 to the length of"),
        ("wanted_rows", torch.tensor([0, 50, 40, 60, 80, 100]), "must ascend, but 50 is followed"),
        ("wanted_rows", torch.tensor([0, 100]), "has 5 steps but `wanted_rows` has 1"),
        ("wanted", torch.full((100,), 1 << 40), f"entry {1 << 40} is outside [0,"),
    ],
)
def test_errors(name: str, value: Any, text: str) -> None:
    args = dict(zip(NAMES, sample(), strict=True))
    simulate_reads(**args)
    with pytest.raises(ArgumentError, match=re.escape(text)):
        simulate_reads(**{**args, name: value})
