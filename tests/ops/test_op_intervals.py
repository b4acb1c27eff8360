"""Selection of intervals against the reference, the definition and simpler selections."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_kv import ops, reference
from swarm_kv.errors import ArgumentError

COSTS = (0.0, 0.3, 1.5, 6.0)


def make_probs(entries, power=1, seed=0):
    return torch.rand(entries, generator=torch.Generator().manual_seed(seed)) ** power


def make_members(entries, copies=0, missing=0, seed=0):
    """Entries in random order, the first `copies` of them twice and the last `missing` not."""
    order = torch.cat([torch.arange(entries - missing), torch.arange(copies)])
    return order[torch.randperm(len(order), generator=torch.Generator().manual_seed(seed))].int()


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def value_of(taken, probs, price, request_cost):
    """The objective of a set of positions."""
    intervals = sum(t and not before for t, before in zip(taken, [False, *taken], strict=False))
    mass = math.fsum(p for p, t in zip(probs, taken, strict=True) if t)
    return mass - price * (request_cost * intervals + sum(taken))


def positions(entries, members):
    taken = set(entries.tolist())
    return [e in taken for e in members.tolist()]


@settings(max_examples=40, deadline=None)
@given(
    probs=st.lists(st.floats(0, 1), min_size=1, max_size=10),
    price=st.floats(0.01, 1.2),
    request_cost=st.sampled_from(COSTS),
)
def test_dynamic_program_is_optimal(probs, price, request_cost):
    best = max(
        value_of(taken, probs, price, request_cost)
        for taken in itertools.product([False, True], repeat=len(probs))
    )
    found = reference.best_intervals(probs, price, request_cost)
    assert math.isclose(value_of(found, probs, price, request_cost), best, abs_tol=1e-12)


@settings(max_examples=120, deadline=None)
@given(
    entries=st.integers(1, 60),
    share=st.floats(0, 1.05),
    power=st.integers(1, 9),
    request_cost=st.sampled_from(COSTS),
    copies=st.integers(0, 20),
    missing=st.integers(0, 10),
    seed=st.integers(0, 1000),
)
def test_matches_reference(entries, share, power, request_cost, copies, missing, seed):
    missing = min(missing, entries - 1)
    members = make_members(entries, min(copies, entries - missing), missing, seed)
    budget = round(share * entries)
    args = (make_probs(entries, power, seed), members, budget, request_cost)
    actual = ops.select_intervals(*args)
    assert actual.tolist() == reference.select_intervals(*args).tolist()
    assert len(actual) == min(budget, entries - missing)


@settings(max_examples=60, deadline=None)
@given(
    probs=st.lists(st.sampled_from([0.0, 1e-9, 0.25, 0.5, 1.0, 1e30]), min_size=1, max_size=40),
    members=st.lists(st.integers(0, 39), max_size=80),
    budget=st.integers(0, 45),
    request_cost=st.sampled_from((*COSTS, 1e-9, 1e300)),
)
def test_takes_exactly_the_budget_whatever_the_values(probs, members, budget, request_cost):
    members = int32(*(m % len(probs) for m in members))
    taken = ops.select_intervals(torch.tensor(probs), members, budget, request_cost).tolist()
    assert len(taken) == min(budget, len(members.unique()))
    assert set(taken) <= set(members.tolist())
    assert taken == sorted(set(taken))


def shortfall(entries, budget, request_cost, power, seed, priced_cost=None):
    """How far a selection is behind the best of others, in the price of as many requests.

    The others: entries one by one, and blocks of eight by their mass. `priced_cost` is the request
    cost that the operator is told, if not the true one.
    """
    probs, members = make_probs(entries, power, seed), make_members(entries, seed=seed)
    values, _, price = reference.interval_prices(probs, members, budget, request_cost)
    told = request_cost if priced_cost is None else priced_cost
    blocks = probs[members.long()].split(8)
    order = sorted(range(len(blocks)), key=lambda b: -blocks[b].sum().item())
    in_blocks = torch.cat([members[8 * b : 8 * b + 8] for b in order])[:budget]
    value, *others = (
        value_of(positions(taken, members), values, price, request_cost)
        for taken in (
            ops.select_intervals(probs, members, budget, told),
            probs.topk(budget).indices,
            in_blocks,
        )
    )
    return (max(others) - value) / (price * request_cost)


@settings(max_examples=40, deadline=None)
@given(
    entries=st.integers(2, 200),
    share=st.floats(0, 0.99),
    request_cost=st.sampled_from(COSTS[1:]),
    power=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
def test_is_not_worse_than_single_entries_or_blocks(entries, share, request_cost, power, seed):
    budget = max(1, int(share * entries))
    assert shortfall(entries, budget, request_cost, power, seed) <= 2 + 1e-6


def test_looks_at_the_request_cost():
    assert shortfall(200, 60, 1.5, 2, 0) < 0
    assert shortfall(200, 60, 1.5, 2, 0, priced_cost=0.0) > -1e-6
    assert shortfall(200, 60, 6.0, 2, 0, priced_cost=0.0) > 2


def test_looks_at_the_order():
    """The same probabilities where they lie together and where they are scattered."""
    probs = torch.full((64,), 0.01)
    probs[16:24] = 0.1
    probs[[2, 50]] = 0.2
    together = ops.select_intervals(probs, torch.arange(64).int(), 8, 1.5)
    assert together.tolist() == list(range(16, 24))
    scattered = ops.select_intervals(probs, torch.arange(64).view(8, 8).T.flatten().int(), 8, 1.5)
    assert {2, 50} <= set(scattered.tolist())


def test_gaps_are_read_along():
    probs = torch.tensor([0.0, 0.0, 0.5, 0.0, 0.5, 0.0, 0.0, 0.3])
    members = torch.arange(8).int()
    assert ops.select_intervals(probs, members, 3, 1.5).tolist() == [2, 3, 4]
    assert ops.select_intervals(probs, members, 3, 0.5).tolist() == [2, 4, 7]


@pytest.mark.parametrize("ties", [False, True])
def test_free_requests_take_the_strongest(ties):
    probs, members = make_probs(300, 3), make_members(300, copies=100, missing=20)
    if ties:
        probs = (probs * 4).round() / 4
    seen = list(dict.fromkeys(members.tolist()))
    expected = sorted(sorted(seen, key=lambda e: -probs[e].item())[:70])  # ties: lower position
    assert ops.select_intervals(probs, members, 70, 0.0).tolist() == expected
    assert ops.select_intervals(probs, members, 70, 1.5).tolist() != expected


@pytest.mark.parametrize("value", [0.0, 0.125, 1.0])
@pytest.mark.parametrize("request_cost", COSTS)
def test_equal_probabilities_take_the_first_positions(value, request_cost):
    members = torch.arange(99, -1, -1).int()
    taken = ops.select_intervals(torch.full((100,), value), members, 7, request_cost)
    assert taken.tolist() == list(range(93, 100))


def test_budgets_at_the_limits():
    probs, members = make_probs(50), make_members(50, copies=9, missing=5)
    for request_cost in COSTS:
        assert ops.select_intervals(probs, members, 0, request_cost).tolist() == []
        assert ops.select_intervals(probs, members, 1, request_cost).numel() == 1
        for budget in (45, 49, 50, 1000):
            taken = ops.select_intervals(probs, members, budget, request_cost)
            assert taken.tolist() == list(range(45))
    assert ops.select_intervals(probs, members[:0], 5, 1.5).tolist() == []
    assert ops.select_intervals(probs[:0], members[:0], 5, 1.5).tolist() == []


def test_copies_count_once():
    probs = torch.tensor([0.5, 0.01, 0.02, 0.03, 0.4])
    # The second place of entry 0 brings nothing, so 4 is not reached through it.
    members = int32(0, 1, 2, 3, 0, 4)
    assert ops.select_intervals(probs, members, 2, 1.5).tolist() == [0, 4]
    # As a gap between others it costs a read but none of the budget.
    probs = torch.tensor([0.9, 0.4, 0.4, 0.01, 0.01, 0.01, 0.01])
    members = int32(0, 3, 4, 5, 6, 1, 0, 2)
    assert ops.select_intervals(probs, members, 3, 1.5).tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes_and_strides(dtype):
    probs, members = make_probs(400, 3).to(dtype), make_members(400)
    expected = ops.select_intervals(probs.float(), members, 50, 1.5)
    assert torch.equal(ops.select_intervals(probs, members, 50, 1.5), expected)
    spread = torch.stack([probs, -probs], dim=1)[:, 0]
    doubled = members.repeat_interleave(2)[::2]
    assert torch.equal(ops.select_intervals(spread, doubled, 50, 1.5), expected)


def test_does_not_depend_on_threads():
    probs, members = make_probs(20_000, 6), make_members(20_000, copies=3000)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = ops.select_intervals(probs, members, 2000, 1.5)
        torch.set_num_threads(3)
        assert torch.equal(ops.select_intervals(probs, members, 2000, 1.5), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(probs=torch.rand(2, 3)), "probs must have 1 dimensions, got float32 [2, 3]"),
        (dict(probs=torch.arange(3)), "probs must be"),
        (dict(probs=torch.tensor([0.1, math.nan, 0.2])), "probs must not be NaN"),
        (dict(probs=torch.tensor([0.1, math.inf, 0.2])), "probs must be finite and not negative"),
        (dict(probs=torch.tensor([0.1, -0.5, 0.2])), "must be finite and not negative, got -0.5"),
        (dict(members=torch.tensor([0, 1])), "members must be int32, got int64 [2]"),
        (dict(members=int32(0, -1)), "members must not be negative, got -1"),
        (dict(members=int32(0, 3)), "members must be below the 3 entries of probs, got 3"),
        (dict(budget=-1), "budget must not be negative, got -1"),
        (dict(request_cost=-1.0), "request_cost must be finite and not negative, got -1"),
        (dict(request_cost=math.inf), "request_cost must be finite and not negative, got inf"),
    ],
)
def test_errors(change, message):
    case = dict(probs=torch.rand(3), members=int32(2, 0, 1), budget=1, request_cost=1.5)
    ops.select_intervals(**case)
    with pytest.raises(ArgumentError) as error:
        ops.select_intervals(**{**case, **change})
    assert str(error.value).startswith("select_intervals: ")
    assert message in str(error.value)
