"""Clusterers by name: what Python hands to the operator, and k-means of the keys."""

import itertools
import types

import pytest
import torch

from swarm_kv import clusterers, ops
from swarm_kv.errors import ArgumentError

CONFIG = types.SimpleNamespace(
    distance="jaccard",
    tau=0.7,
    cluster_size=12,
    max_replicas=2,
    min_activation=2,
    cold="coded",
    block=5,
    max_index_bytes=0,
)


def changed(**settings):
    return types.SimpleNamespace(**{**vars(CONFIG), **settings})


def signatures(entries=120, seed=0):
    """Entries of ten topics, dealt out in turn: neighbours are of different topics."""
    generator = torch.Generator().manual_seed(seed)
    topics = torch.rand(10, 60, generator=generator) < 0.2
    noise = torch.rand(entries, 60, generator=generator) < 0.03
    weights = torch.ones(60, dtype=torch.int64) << torch.arange(60)
    return ((topics[torch.arange(entries) % 10] ^ noise).long() * weights).sum(-1)[:, None]


def keys(entries=120, centres=8, seed=0):
    """Keys around a few centres; entry i is of centre i % centres."""
    generator = torch.Generator().manual_seed(seed)
    points = 10 * torch.randn(centres, 2, 8, generator=generator)
    noise = torch.randn(2, entries, 8, generator=generator)
    return points[torch.arange(entries) % centres].transpose(0, 1) + noise


def as_lists(offsets, members):
    return [members[a:b].tolist() for a, b in itertools.pairwise(offsets.tolist())]


@pytest.mark.parametrize("name", clusterers.names())
def test_every_clusterer_covers_every_entry(name):
    offsets, members = clusterers.resolve(name)(signatures(), keys(), CONFIG)
    assert offsets.dtype == members.dtype == torch.int32
    assert offsets[0] == 0
    assert offsets[-1] <= members.numel()
    assert (offsets.diff() > 0).all()
    assert (offsets.diff() <= CONFIG.cluster_size).all()
    copies = torch.bincount(members, minlength=120)
    assert copies.min() >= 1
    assert copies.max() <= CONFIG.max_replicas
    assert as_lists(offsets, members) == as_lists(
        *clusterers.resolve(name)(signatures(), keys(), CONFIG)
    )


@pytest.mark.parametrize(
    "name", ["swarm", "no_replica", "medoid_only", "hypergraph", "sequence_blocks"]
)
def test_settings_reach_the_operator(name):
    for settings in (
        {},
        dict(distance="conditional", tau=0.4),
        dict(cluster_size=3, max_replicas=1),
        dict(min_activation=11, cold="packed"),
        dict(min_activation=11, cold="single", max_index_bytes=64),
    ):
        config = changed(**settings)
        ours = clusterers.resolve(name)(signatures(), keys(), config)
        given = vars(config) | {"max_size": config.cluster_size}
        del given["cluster_size"]
        expected = ops.cluster(signatures(), name, **given)
        assert torch.equal(ours[0], expected[0])
        assert torch.equal(ours[1], expected[1])
    # which would not tell anything if no setting mattered
    one = clusterers.resolve(name)(signatures(), keys(), changed(cluster_size=3))
    assert not torch.equal(one[0], clusterers.resolve(name)(signatures(), keys(), CONFIG)[0])


def test_hypergraph_needs_fewer_reads_than_the_sequence():
    bits = signatures()
    active = ((bits >> torch.arange(60)) & 1).bool()  # [entries, queries]

    def reads(name):
        clusters = as_lists(*clusterers.resolve(name)(bits, keys(), CONFIG))
        return sum(int(active[members].sum(0).ge(3).sum()) for members in clusters)

    assert reads("hypergraph") < 0.6 * reads("sequence_blocks")


def test_kmeans_finds_the_centres_of_the_keys():
    config = changed(cluster_size=64)
    clusters = as_lists(*clusterers.kmeans_keys(signatures(), keys(), config))
    assert sorted(map(sorted, clusters)) == [list(range(c, 120, 8)) for c in range(8)]
    other = as_lists(*clusterers.kmeans_keys(signatures(), keys(centres=7), config))
    assert sorted(map(sorted, other)) != sorted(map(sorted, clusters))


def test_kmeans_members_by_distance_and_cut_in_that_order():
    whole = as_lists(*clusterers.kmeans_keys(signatures(), keys(), changed(cluster_size=64)))
    cut = as_lists(*clusterers.kmeans_keys(signatures(), keys(), changed(cluster_size=4)))
    assert [c[i : i + 4] for c in whole for i in range(0, len(c), 4)] == cut
    rows = keys().transpose(0, 1).flatten(1)
    for members in whole:
        distances = (rows[members] - rows[members].mean(0)).norm(dim=1)
        assert (distances.diff() >= -1e-4).all()


def test_kmeans_of_no_entries_and_of_few():
    offsets, members = clusterers.kmeans_keys(signatures(0), keys(0), CONFIG)
    assert offsets.tolist() == [0]
    assert members.tolist() == []
    _, members = clusterers.kmeans_keys(signatures(3), keys(3), CONFIG)
    assert sorted(members.tolist()) == [0, 1, 2]


def test_registering_and_resolving():
    @clusterers.clusterer("everything at once")
    def everything(bits, keys, config):
        entries = len(bits)
        return torch.tensor([0, entries]).int(), torch.arange(entries).int()

    try:
        assert "everything at once" in clusterers.names()
        assert clusterers.resolve("everything at once") is everything
    finally:
        del clusterers._CLUSTERERS["everything at once"]
    assert clusterers.resolve(everything) is everything
    for choice in ("everything at once", None):
        with pytest.raises(ArgumentError) as error:
            clusterers.resolve(choice)
        for name in clusterers.names():
            assert name in str(error.value)
