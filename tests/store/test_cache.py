"""The simulated cluster cache against a naive one and against real fetches; the reuse meter."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from swarm_kv import miss_ratio
from swarm_kv.errors import ArgumentError
from swarm_kv.miss_ratio import MissRatioCurve
from swarm_kv.simulate import simulate_cache
from swarm_kv.store import NOTHING, Segment, Store, Wanted

from .helpers import Data, blocks, open_store, pack

pytestmark = pytest.mark.timeout(120)

POLICIES = ("swarm", "decayed_frequency", "lru", "lfu", "arc")
ENTRIES = 40
Worth = Callable[[int, list[list[int]]], float]


def sample(
    policy: str, capacity: int, steps: list[list[int]], activations: list[int] | None = None
) -> tuple[Any, ...]:
    offsets, wanted = pack(steps)
    model = torch.tensor([1e-5], dtype=torch.float64), torch.tensor([1e-9], dtype=torch.float64)
    fill = ("none", []) if activations is None else ("printed", activations)
    return (
        *blocks(ENTRIES, 1),
        ENTRIES,
        100,
        *model,
        "sequential",
        policy,
        capacity,
        fill[0],
        torch.tensor(fill[1], dtype=torch.int32),
        64,
        wanted.long(),
        offsets.long(),
    )


def last_use(entry: int, past: list[list[int]]) -> float:
    return max((t for t, step in enumerate(past) if entry in step), default=-1)


def uses(entry: int, past: list[list[int]]) -> float:
    return sum(entry in step for step in past)


def decayed(entry: int, past: list[list[int]]) -> float:
    terms = (0.85 ** (len(past) - 1 - t) for t, step in enumerate(past) if entry in step)
    return round(sum(terms), 5)  # the cache sums in float32


WORTHS: dict[str, Worth] = {"lru": last_use, "lfu": uses, "decayed_frequency": decayed}


def naive(worth: Worth, capacity: int, steps: list[list[int]]) -> list[bool]:
    """Keeps the `capacity` entries of most worth: looks at everything that ever happened."""
    cached: list[int] = []
    hits = []
    for now, step in enumerate(steps, 1):
        past = steps[:now]
        found = [entry in cached for entry in step]
        hits += found
        held = [entry for entry, hit in zip(step, found, strict=True) if hit]
        missed = [entry for entry, hit in zip(step, found, strict=True) if not hit]
        for offer in sorted(missed, key=lambda e: (-worth(e, past), e)):
            if len(cached) == capacity:
                loose = [entry for entry in cached if entry not in held]
                if not loose:
                    break
                victim = min(loose, key=lambda e: (worth(e, past), -e))
                if worth(victim, past) >= worth(offer, past):
                    break
                cached.remove(victim)
            cached.append(offer)
    return hits


STEPS = st.lists(
    st.lists(st.integers(0, ENTRIES - 1), unique=True, max_size=15), min_size=1, max_size=25
)


@pytest.mark.parametrize("policy", WORTHS)
@settings(deadline=None, max_examples=40)
@given(steps=STEPS, capacity=st.integers(0, ENTRIES + 5))
def test_serves_what_a_naive_cache_serves(
    policy: str, steps: list[list[int]], capacity: int
) -> None:
    hits = simulate_cache(*sample(policy, capacity, steps))
    assert hits.tolist() == naive(WORTHS[policy], capacity, steps)


@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None, max_examples=40)
@given(steps=STEPS)
def test_a_cache_of_everything_misses_only_first_uses(policy: str, steps: list[list[int]]) -> None:
    seen: set[int] = set()
    first = []
    for step in steps:
        first += [entry in seen for entry in step]
        seen.update(step)
    assert simulate_cache(*sample(policy, ENTRIES, steps)).tolist() == first
    assert not simulate_cache(*sample(policy, 0, steps)).any()


def habits(count: int, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """Steps that mostly activate a few entries, and a profile that says so."""
    rng = random.Random(seed)
    rates = [64 // (1 + e % 20) for e in range(ENTRIES)]
    steps = [[e for e in range(ENTRIES) if rng.random() * 64 < rates[e]] for _ in range(count)]
    return steps, rates


def test_policies_are_told_apart_and_a_profile_helps() -> None:
    steps, rates = habits(60)
    results = {policy: simulate_cache(*sample(policy, 6, steps)) for policy in POLICIES}
    assert len({tuple(hits.tolist()) for hits in results.values()}) == len(POLICIES)
    early = sum(map(len, steps[:3]))
    for policy, cold in results.items():
        warm = simulate_cache(*sample(policy, 6, steps, rates))
        wrong = simulate_cache(*sample(policy, 6, steps, [64 - rate for rate in rates]))
        assert warm[:early].sum() > cold[:early].sum() > 0, policy
        assert warm[:early].sum() > wrong[:early].sum(), policy


@pytest.mark.parametrize("policy", POLICIES)
def test_equals_real_fetches(policy: str) -> None:
    steps, rates = habits(40, 1)
    data = Data.random(ENTRIES, 2, 64)
    capacity = 9

    def filled(dram: int) -> tuple[Store, Segment]:
        store = open_store(["a"], engine="simulated", cache_policy=policy, dram_bytes=dram)
        activations = torch.tensor(rates, dtype=torch.int32)
        clusters = blocks(ENTRIES, 1)
        return store, store.write(data.k, data.v, *clusters, "x", activations, "printed", 64)

    ample, kept = filled(8 << 20)
    counters = ample.counters()
    held = counters["dram"]["used"] - counters["dram"]["cache"]
    store, segment = filled(held + capacity * counters["cached_entry_bytes"])
    assert store.counters()["dram"]["cached_entries"] == capacity
    del kept
    served = []
    for step in steps:
        with store.fetch([Wanted((segment,), NOTHING, torch.tensor(step), ENTRIES)]) as fetch:
            resident = set(fetch.resident[0][0].tolist())
            served += [entry in resident for entry in step]
            fetch.complete()
    assert served == simulate_cache(*sample(policy, capacity, steps, rates)).tolist()
    assert served != simulate_cache(*sample(policy, capacity + 1, steps, rates)).tolist()


def test_errors_name_the_value() -> None:
    def message(**changes: Any) -> str:
        args = list(sample("lru", 4, [[1, 2], [3]]))
        for place, value in changes.values():
            args[place] = value
        with pytest.raises(ArgumentError) as caught:
            simulate_cache(*args)
        return str(caught.value)

    assert 'unknown `cache_policy` "fast"; choose one of: swarm' in message(p=(7, "fast"))
    assert "`capacity` must be at least 0, got -1" in message(c=(8, -1))
    assert 'unknown `initial_fill` "all"' in message(f=(9, "all"))
    assert "counts activations of 0 entries" in message(f=(9, "printed"))
    assert "entry 40 is outside [0, 40)" in message(w=(12, torch.tensor([1, 40, 3])))
    assert "names entry 2 twice" in message(w=(12, torch.tensor([2, 2, 3])))
    assert "`wanted_rows` must run from 0" in message(r=(13, torch.tensor([0, 2])))


def test_is_an_operator_that_compiles() -> None:
    args = sample("swarm", 6, habits(5)[0], habits(5)[1])
    torch.library.opcheck(torch.ops.swarm_kv.simulate_cache.default, args)
    real = simulate_cache(*args)
    with FakeTensorMode(allow_non_fake_inputs=True):
        traced = simulate_cache(*args)
    assert (traced.shape, traced.dtype) == (real.shape, real.dtype)


def test_stats_tell_what_other_sizes_would_miss() -> None:
    steps, _ = habits(80, 2)
    data = Data.random(ENTRIES)
    store = open_store(["a"], engine="simulated")
    segment = data.write(store)
    assert store.stats().miss_ratio.worth_having() is None
    assert "no decoding step" in store.stats().miss_ratio.table()
    for step in steps:
        with store.fetch([Wanted((segment,), NOTHING, torch.tensor(step), ENTRIES)]) as fetch:
            fetch.complete()
    curve = store.stats().miss_ratio
    wanted = sum(map(len, steps))
    assert curve.activations == wanted  # so few entries are all sampled
    assert curve.context_bytes == ENTRIES * store.counters()["cached_entry_bytes"]
    for capacity in (20, 30, ENTRIES):
        missed = 1 - simulate_cache(*sample("lru", capacity, steps)).float().mean().item()
        assert curve.at(capacity / ENTRIES) == pytest.approx(missed, abs=1e-6)
    assert curve.at(1.0) == pytest.approx(curve.first)
    assert list(curve.misses) == sorted(curve.misses, reverse=True)
    assert store.stats().to_dict()["miss_ratio"]["activations"] == wanted
    store.close()


def test_the_size_worth_having_ends_where_gains_do(tmp_path: Any) -> None:
    distances = [0] * 100
    distances[19] = 600  # a working set of a fifth of the context
    distances[69] = 20
    curve = MissRatioCurve.of(distances, 380, 1000.0, 100 << 20)
    assert curve.at(0.19) == 1.0
    assert curve.at(0.20) == pytest.approx(0.4)
    assert curve.at(0.195) == pytest.approx(0.7)
    assert curve.worth_having() == pytest.approx(0.20)
    assert curve.worth_having(least_gain=0.3) == pytest.approx(0.70)
    assert curve.worth_having(least_gain=90) == 0.0
    text = curve.table()
    assert "20.0 MiB" in text
    assert "worth having" in text
    with pytest.raises(ArgumentError, match=r"`share` \(1.5\)"):
        curve.at(1.5)
    curve.plot(tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").stat().st_size > 1000
    assert miss_ratio.LEAST_GAIN == 0.5
