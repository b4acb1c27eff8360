"""activation_signatures and cluster against the reference; C++ tests have the edge cases."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_kv import ops, reference
from swarm_kv.errors import ArgumentError


def make_layer(heads=4, kv_heads=2, queries=70, entries=150, dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return dict(
        q=torch.randn(heads, queries, dim, generator=generator),
        k=torch.randn(kv_heads, entries, dim, generator=generator),
        q_positions=torch.arange(entries - queries, entries),
        sparsity=0.1,
        window=8,
        sinks=2,
        scale=dim**-0.5,
    )


def test_signatures_match_reference():
    case = make_layer()
    bits = ops.activation_signatures(**case)
    assert bits.shape == (150, 2)
    assert torch.equal(bits, reference.activation_signatures(**case))
    counts = reference.unpack_bits(bits).sum(0)
    assert (counts[:70] == 15).all()
    assert (counts[70:] == 0).all()
    assert not torch.equal(bits, reference.activation_signatures(**{**case, "window": 9}))


@settings(max_examples=25, deadline=None)
@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    queries=st.integers(1, 140),
    entries=st.integers(1, 90),
    sparsity=st.sampled_from([0.01, 0.1, 0.5, 1.0]),
    window=st.integers(0, 30),
    sinks=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_signatures_random_shapes(kv_heads, group, queries, entries, sparsity, window, sinks, seed):
    case = make_layer(kv_heads * group, kv_heads, queries, entries, 8, seed)
    case.update(sparsity=sparsity, window=window, sinks=sinks)
    case["q_positions"] = torch.arange(queries) * entries // queries
    bits = ops.activation_signatures(**case)
    assert torch.equal(bits, reference.activation_signatures(**case))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_signatures_of_other_dtypes_and_strides(dtype):
    case = make_layer()
    case["q"], case["k"] = case["q"].to(dtype), case["k"].to(dtype)
    widened = {**case, "q": case["q"].float(), "k": case["k"].float()}
    strided = {**case, "k": case["k"].transpose(0, 1).contiguous().transpose(0, 1)}
    expected = ops.activation_signatures(**widened)
    assert torch.equal(ops.activation_signatures(**case), expected)
    assert torch.equal(ops.activation_signatures(**strided), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=torch.randn(4, 70)), "q must have 3 dimensions"),
        (dict(k=torch.randn(2, 150, 17)), "k must have features of q = 16"),
        (dict(q_positions=torch.arange(70).int()), "q_positions must be int64, got int32 [70]"),
        (dict(q_positions=torch.arange(69)), "q_positions must have queries = 70"),
        (dict(k=torch.randn(3, 150, 16)), "3"),
        (dict(sparsity=0.0), "sparsity"),
        (dict(window=-1), "window"),
        (dict(q=torch.full((4, 70, 16), math.nan)), "q"),
    ],
)
def test_signature_errors(change, message):
    case = make_layer()
    ops.activation_signatures(**case)
    with pytest.raises(ArgumentError) as error:
        ops.activation_signatures(**{**case, **change})
    assert message in str(error.value)


def grouped_bits(groups=6, size=7, queries=120, noise=0.1, seed=0):
    """Entries of a group share most of their queries."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.rand(groups, queries, generator=generator) < 0.25
    flips = torch.rand(groups, size, queries, generator=generator) < noise
    matrix = (base[:, None] ^ flips).flatten(0, 1)
    matrix = torch.nn.functional.pad(matrix, (0, -queries % 64)).view(groups * size, -1, 64)
    weights = torch.ones(64, dtype=torch.int64) << torch.arange(64)
    return (matrix.long() * weights).sum(-1)


def as_lists(offsets, members):
    return [members[a:b].tolist() for a, b in itertools.pairwise(offsets.tolist())]


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("tau", [0.3, 0.6, 0.85])
@pytest.mark.parametrize(("max_size", "max_replicas"), [(64, 3), (4, 1), (1, 1), (8, 2)])
def test_clusters_match_reference(noise, tau, max_size, max_replicas):
    bits = grouped_bits(noise=noise)
    args = (bits, tau, max_size, max_replicas, 3)
    assert as_lists(*ops.cluster(*args)) == as_lists(*reference.cluster(*args))


@settings(max_examples=30, deadline=None)
@given(
    groups=st.integers(1, 6),
    size=st.integers(1, 9),
    queries=st.integers(1, 130),
    noise=st.sampled_from([0.0, 0.05, 0.2, 0.5]),
    tau=st.sampled_from([0.0, 0.45, 0.7, 0.95]),
    max_size=st.integers(1, 12),
    max_replicas=st.integers(1, 4),
    min_activation=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
def test_clusters_of_random_signatures(
    groups, size, queries, noise, tau, max_size, max_replicas, min_activation, seed
):
    args = (
        grouped_bits(groups, size, queries, noise, seed),
        tau,
        max_size,
        max_replicas,
        min_activation,
    )
    offsets, members = ops.cluster(*args)
    assert as_lists(offsets, members) == as_lists(*reference.cluster(*args))
    copies = torch.bincount(members, minlength=groups * size)
    assert copies.min() >= 1
    assert copies.max() <= max_replicas
    assert offsets.diff().max() <= max_size


def test_clusters_find_groups():
    lists = as_lists(*ops.cluster(grouped_bits(noise=0.02), 0.6))
    assert sorted(map(sorted, lists)) == [list(range(7 * g, 7 * g + 7)) for g in range(6)]
    loose = as_lists(*ops.cluster(grouped_bits(noise=0.5), 0.6))
    assert len(loose) > 6


def test_no_entries():
    offsets, members = ops.cluster(torch.empty(0, 2, dtype=torch.int64))
    assert offsets.tolist() == [0]
    assert members.tolist() == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.zeros(5, dtype=torch.int64),), "bits must have 2 dimensions, got int64 [5]"),
        ((torch.zeros(5, 1),), "bits must be int64, got float32 [5, 1]"),
        ((torch.zeros(5, 1, dtype=torch.int64), 1.5), "tau"),
        ((torch.zeros(5, 1, dtype=torch.int64), 0.5, 0), "max_size"),
        ((torch.zeros(5, 1, dtype=torch.int64), 0.5, 2, 0), "max_replicas"),
        ((torch.zeros(5, 1, dtype=torch.int64), 0.5, 2, 2, 0), "min_activation"),
    ],
)
def test_cluster_errors(args, message):
    with pytest.raises(ArgumentError) as error:
        ops.cluster(*args)
    assert message in str(error.value)
