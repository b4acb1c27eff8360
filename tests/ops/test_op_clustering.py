"""cluster against the reference; C++ tests have the edge cases."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_kv import ops, reference
from swarm_kv.errors import ArgumentError


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
    """The members of each cluster, and the loose ones."""
    clusters = [members[a:b].tolist() for a, b in itertools.pairwise(offsets.tolist())]
    return clusters, members[offsets[-1] :].tolist()


@pytest.mark.parametrize("clusterer", ["swarm", "no_replica", "medoid_only", "sequence_blocks"])
@pytest.mark.parametrize("cold", ["coded", "packed", "single"])
@pytest.mark.parametrize(
    ("distance", "tau"),
    [("jaccard", 0.3), ("jaccard", 0.6), ("conditional", 0.45), ("global", 1 - 5e-5)],
)
@pytest.mark.parametrize(("max_size", "max_replicas"), [(64, 3), (4, 2), (1, 1)])
def test_clusters_match_reference(clusterer, cold, distance, tau, max_size, max_replicas):
    options = dict(
        clusterer=clusterer,
        distance=distance,
        tau=tau,
        max_size=max_size,
        max_replicas=max_replicas,
        min_activation=20,
        cold=cold,
        block=3,
    )
    for noise, limit in ((0.02, 0), (0.1, 0), (0.1, 100), (0.3, 0)):
        args = dict(bits=grouped_bits(noise=noise), **options, max_index_bytes=limit)
        assert as_lists(*ops.cluster(**args)) == as_lists(*reference.cluster(**args))


@settings(max_examples=60, deadline=None)
@given(
    clusterer=st.sampled_from(["swarm", "no_replica", "medoid_only", "hypergraph"]),
    distance=st.sampled_from(["jaccard", "conditional", "global"]),
    groups=st.integers(1, 6),
    size=st.integers(1, 9),
    queries=st.integers(1, 130),
    noise=st.sampled_from([0.0, 0.05, 0.2, 0.5]),
    tau=st.sampled_from([0.0, 0.45, 0.7, 0.95, 0.9999]),
    max_size=st.integers(1, 12),
    max_replicas=st.integers(1, 4),
    min_activation=st.integers(1, 9),
    cold=st.sampled_from(["coded", "packed", "single"]),
    limit=st.sampled_from([0, 1, 50, 1000]),
    seed=st.integers(0, 1000),
)
def test_clusters_of_random_signatures(
    clusterer,
    distance,
    groups,
    size,
    queries,
    noise,
    tau,
    max_size,
    max_replicas,
    min_activation,
    cold,
    limit,
    seed,
):
    args = (
        grouped_bits(groups, size, queries, noise, seed),
        clusterer,
        distance,
        tau,
        max_size,
        max_replicas,
        min_activation,
        cold,
        5,
        limit,
    )
    offsets, members = ops.cluster(*args)
    if clusterer != "hypergraph":
        assert as_lists(offsets, members) == as_lists(*reference.cluster(*args))
    copies = torch.bincount(members, minlength=groups * size)
    assert copies.min() >= 1
    assert copies.max() <= max_replicas
    if cold == "coded":
        assert (offsets.diff() <= max_size).all()
        assert (offsets.diff() >= 2).all()
    else:
        assert offsets[-1] == members.numel()


@pytest.mark.parametrize("clusterer", ["swarm", "no_replica", "medoid_only", "hypergraph"])
def test_clusters_find_groups(clusterer):
    options = dict(clusterer=clusterer, tau=0.6, max_size=7 if clusterer == "hypergraph" else 64)
    groups, loose = as_lists(*ops.cluster(grouped_bits(noise=0.02), **options))
    assert sorted(map(sorted, groups)) == [list(range(7 * g, 7 * g + 7)) for g in range(6)]
    assert loose == []
    by_chance, _ = as_lists(*ops.cluster(grouped_bits(noise=0.5), **options))
    assert sorted(map(sorted, by_chance)) != sorted(map(sorted, groups))


def test_sequence_blocks():
    groups, loose = as_lists(*ops.cluster(grouped_bits(), "sequence_blocks", max_size=20))
    assert groups == [list(range(20)), list(range(20, 40)), [40, 41]]
    assert loose == []


def test_distances_differ():
    """Entry 1 is active in a quarter of entry 0's queries and never without it."""
    bits = torch.tensor([[0xFFFF], [0xF]])
    assert as_lists(*ops.cluster(bits, distance="jaccard", min_activation=1))[0] == []
    assert as_lists(*ops.cluster(bits, distance="conditional", min_activation=1))[0] == [[0, 1]]


def test_no_entries():
    for clusterer in ("swarm", "no_replica", "medoid_only", "hypergraph", "sequence_blocks"):
        offsets, members = ops.cluster(torch.empty(0, 2, dtype=torch.int64), clusterer)
        assert offsets.tolist() == [0]
        assert members.tolist() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(bits=torch.zeros(5).long()), "bits must have 2 dimensions, got int64 [5]"),
        (dict(bits=torch.zeros(5, 1)), "bits must be int64, got float32 [5, 1]"),
        (dict(clusterer="k"), "swarm, no_replica, medoid_only, hypergraph, sequence_blocks"),
        (dict(distance="k"), "jaccard, conditional, global"),
        (dict(tau=1.5), "tau"),
        (dict(max_size=0), "max_size"),
        (dict(max_replicas=0), "max_replicas"),
        (dict(min_activation=0), "min_activation"),
        (dict(cold="warm"), "coded, packed, single"),
        (dict(block=0), "block"),
        (dict(max_index_bytes=-1), "max_index_bytes"),
    ],
)
def test_cluster_errors(options, message):
    valid = dict(bits=torch.zeros(5, 1).long())
    ops.cluster(**valid)
    with pytest.raises(ArgumentError) as error:
        ops.cluster(**(valid | options))
    assert message in str(error.value)


def test_hypergraph_has_no_reference():
    with pytest.raises(NotImplementedError, match="hypergraph"):
        reference.cluster(grouped_bits(), "hypergraph")
