"""Baselines: what they rank by against plain loops, what they read, how summaries grow."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm_kv import SwarmConfig, baselines, codes, index, selectors
from swarm_kv.baselines import clusterkv, infllm, oracle, pqcache, quest
from swarm_kv.errors import ArgumentError
from swarm_kv.summary import Clustered

HEADS, KV_HEADS, DIM, ENTRIES = 4, 2, 16, 96
CONFIG = SwarmConfig(paths="/nowhere", window=10)
SUMMARIES = [name for name in baselines.names() if selectors.summary_of(selectors.resolve(name))]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


QUERY = random(HEADS, 2, DIM, seed=1)
LATE = random(HEADS, 30, DIM, seed=2)


def clustered(
    entries: int = ENTRIES, seed: int = 0, size: int = 8, queries: Tensor | None = LATE
) -> Clustered:
    """Entries in random clusters of `size`; the first two entries also stand in the last one."""
    order = torch.randperm(entries, generator=torch.Generator().manual_seed(seed)).int()
    offsets, _ = index.sequence_blocks(entries, size)
    copies = torch.tensor([0, 1]).int()
    more = torch.cat([offsets[:-1], offsets[-1:] + 2])
    keys = random(KV_HEADS, entries, DIM, seed=seed + 10)
    return Clustered(keys, more, torch.cat([order, copies]), None, queries)


def lists_of(of: Clustered) -> list[list[int]]:
    return [of.members[a:b].tolist() for a, b in itertools.pairwise(of.offsets.tolist())]


def indexed(name: str, of: Clustered) -> index.Index:
    make = selectors.summary_of(selectors.resolve(name))
    summary = None if make is None else make(of, CONFIG)
    return index.build(codes.train(of.keys, 4), of.keys, of.offsets, of.members, summary)


def read(name: str, which: index.Index, budget: int) -> list[int]:
    """Numbers of the entries that a selector takes."""
    clusters, entries = selectors.resolve(name)(QUERY, which, budget, CONFIG)
    numbers = index.members_of(which.offsets, which.members, clusters, entries)
    return [number for number in numbers.tolist() if number < which.limit]


def rows() -> list[tuple[int, Tensor]]:
    """KV head and vector of every query."""
    return [
        (head * KV_HEADS // HEADS, QUERY[head, number])
        for head in range(HEADS)
        for number in (0, 1)
    ]


def softmaxes(score: Any, count: int) -> Tensor:
    """Mean over all queries of the softmax of `score(kv_head, query, number)`."""
    each = [
        torch.stack([score(head, row, number) for number in range(count)]).softmax(0)
        for head, row in rows()
    ]
    return torch.stack(each).mean(0)


def tensors(summary: Any) -> dict[str, Tensor]:
    return {field.name: getattr(summary, field.name) for field in dataclasses.fields(summary)}


# ---- what they rank by


def test_quest_goes_by_the_greatest_product_within_bounds() -> None:
    of = clustered()
    got = quest.Bounds.build(of, CONFIG).score(QUERY)

    def bound(head: int, row: Tensor, cluster: int) -> Tensor:
        keys = of.keys[head, lists_of(of)[cluster]]
        return torch.maximum(row * keys.amax(0), row * keys.amin(0)).sum()

    def wrong(head: int, row: Tensor, cluster: int) -> Tensor:
        return (row * of.keys[head, lists_of(of)[cluster]].amax(0)).sum()

    torch.testing.assert_close(got, softmaxes(bound, of.clusters), rtol=0.02, atol=1e-4)
    assert not torch.allclose(got, softmaxes(wrong, of.clusters), rtol=0.02, atol=1e-4)


def test_clusterkv_goes_by_mean_keys() -> None:
    of = clustered()
    got = clusterkv.Centroids.build(of, CONFIG).score(QUERY)
    expected = softmaxes(
        lambda head, row, cluster: row @ of.keys[head, lists_of(of)[cluster]].mean(0), of.clusters
    )
    torch.testing.assert_close(got, expected, rtol=0.01, atol=1e-5)


def best_members(of: Clustered, head: int, cluster: int, queries: Tensor) -> list[int]:
    mean = queries.view(KV_HEADS, -1, DIM)[head].mean(0)
    members = lists_of(of)[cluster]
    return sorted(members, key=lambda entry: -float(mean @ of.keys[head, entry]))[:4]


@pytest.mark.parametrize("size", [8, 3])
def test_infllm_goes_by_the_members_that_queries_score_highest(size: int) -> None:
    of = clustered(size=size)
    summary = infllm.Representatives.build(of, CONFIG)
    expected = torch.stack(
        [
            torch.stack(
                [
                    of.keys[head, best_members(of, head, cluster, LATE)].mean(0)
                    for cluster in range(of.clusters)
                ]
            )
            for head in range(KV_HEADS)
        ]
    )
    torch.testing.assert_close(summary.vectors.float(), expected, rtol=2e-3, atol=2e-3)
    products = sum(expected[head] @ row for head, row in rows())
    torch.testing.assert_close(summary.score(QUERY), products, rtol=0.01, atol=0.02)
    others = infllm.Representatives.build(dataclasses.replace(of, queries=-LATE), CONFIG)
    # All of three members represent their cluster, whoever asks; the last one has five.
    assert torch.equal(others.vectors[:, :-1], summary.vectors[:, :-1]) == (size == 3)


def test_infllm_without_queries() -> None:
    """The first members; and what was asked before where nothing is known of later entries."""
    of = clustered(queries=None)
    first = infllm.Representatives.build(of, CONFIG)
    expected = of.keys[0, lists_of(of)[0][:4]].mean(0)
    torch.testing.assert_close(first.vectors[0, 0].float(), expected, rtol=2e-3, atol=2e-3)
    known = infllm.Representatives.build(clustered(), CONFIG)
    assert torch.equal(known.alike(of).vectors, known.vectors)
    nan = dataclasses.replace(of, queries=torch.full_like(LATE, torch.nan))
    assert torch.equal(known.alike(nan).vectors, known.vectors)
    assert not torch.equal(first.vectors, known.vectors)


def test_oracle_goes_by_exact_attention() -> None:
    of = clustered()
    exact = softmaxes(lambda head, row, entry: row @ of.keys[head, entry], ENTRIES)
    best = exact.topk(20).indices.sort().values.tolist()
    assert read("oracle", indexed("oracle", of), 20) == best
    assert read("pqcache", indexed("pqcache", of), 20) != best
    assert read("oracle", indexed("oracle", clustered(seed=1)), 20) != best


def test_pqcache_goes_by_the_nearest_centroids() -> None:
    of = dataclasses.replace(clustered(), keys=random(KV_HEADS, 400, DIM))
    summary = pqcache.Quantised.build(of, CONFIG)
    assert summary.centroids.shape == (KV_HEADS, 2, 64, DIM // 2)
    assert summary.codes.shape == (KV_HEADS, 2, 400)
    quantised = torch.empty_like(of.keys)
    for head, part, entry in itertools.product(range(KV_HEADS), range(2), range(400)):
        half = slice(part * DIM // 2, (part + 1) * DIM // 2)
        distances = (summary.centroids[head, part] - of.keys[head, entry, half]).norm(dim=1)
        assert distances[int(summary.codes[head, part, entry])] <= distances.min() + 1e-5
        quantised[head, entry, half] = summary.centroids[head, part, distances.argmin()]
    expected = softmaxes(lambda head, row, entry: row @ quantised[head, entry], 400)
    torch.testing.assert_close(summary.score(QUERY), expected, rtol=1e-4, atol=1e-8)
    error = (quantised - of.keys).square().sum() / of.keys.square().sum()
    assert 0 < error < 0.5  # centroids were fitted: random ones are farther than nothing


def test_few_distinct_keys_are_quantised_without_loss() -> None:
    of = clustered(seed=3)
    of = dataclasses.replace(of, keys=of.keys[:, torch.arange(ENTRIES) % 20])
    exact = oracle.Keys.build(of, CONFIG).keys
    summary = pqcache.Quantised.build(of, CONFIG)
    halves = torch.stack([summary.centroids[0, p, summary.codes[0, p].long()] for p in (0, 1)])
    # Nearly: centroids that would be empty are halves of others, pushed apart a little.
    torch.testing.assert_close(halves.transpose(0, 1).flatten(1), exact[0], rtol=2e-3, atol=1e-3)


# ---- what they read


@pytest.mark.parametrize("name", ["quest", "infllm", "clusterkv"])
@pytest.mark.parametrize("budget", [1, 20, 30, 90, ENTRIES, 500])
def test_ranked_clusters_come_as_near_to_the_budget_as_they_can(name: str, budget: int) -> None:
    of = clustered()
    which = indexed(name, of)
    summary: Any = which.summary
    order = summary.score(QUERY).argsort(descending=True, stable=True).tolist()
    lists = lists_of(of)
    sizes = [len(set().union(*(lists[c] for c in order[:n]))) for n in range(len(order) + 1)]
    got = read(name, which, budget)
    if name == "clusterkv":
        assert len(got) == min(budget, ENTRIES)
        whole = max(n for n, size in enumerate(sizes) if size <= budget)
        assert set(got) >= set().union(*(lists[c] for c in order[:whole]))
        assert set(got) <= set().union(*(lists[c] for c in order[: whole + 1]))
    else:
        count = min(range(1, len(sizes)), key=lambda n: (abs(sizes[n] - budget), -n))
        assert got == sorted(set().union(*(lists[c] for c in order[:count])))


def test_a_trimmed_cluster_gives_its_first_members() -> None:
    of = clustered()
    which = indexed("clusterkv", of)
    order = which.known(clusterkv.Centroids).score(QUERY).argsort(descending=True).tolist()
    assert read("clusterkv", which, 3) == sorted(lists_of(of)[order[0]][:3])


@pytest.mark.parametrize("name", ["oracle", "pqcache"])
def test_entries_fill_the_budget(name: str) -> None:
    which = indexed(name, clustered())
    assert [len(read(name, which, budget)) for budget in (1, 17, 200)] == [1, 17, ENTRIES]


def test_streaming_reads_what_the_window_does_not_hold() -> None:
    which = indexed("streaming", clustered())
    assert read("streaming", which, CONFIG.window) == []
    assert read("streaming", which, CONFIG.window + 3) == [93, 94, 95]
    assert read("streaming", which.cropped(50), CONFIG.window + 3) == [47, 48, 49]
    assert read("streaming", which, 1000) == list(range(ENTRIES))


def test_full_reads_everything() -> None:
    which = indexed("full", clustered())
    assert read("full", which, 1) == list(range(ENTRIES))
    assert read("full", which.cropped(50), 1) == list(range(50))


@pytest.mark.parametrize("name", baselines.names())
@pytest.mark.parametrize("limit", [1, 11, 60])
def test_what_was_cropped_takes_no_place(name: str, limit: int) -> None:
    of = dataclasses.replace(clustered(), members=torch.arange(ENTRIES + 2).int() % ENTRIES)
    which = indexed(name, of)
    budget = CONFIG.window + limit if name == "streaming" else limit
    assert read(name, which.cropped(limit), budget) == list(range(limit))
    if limit == 11 and name not in ("streaming", "full"):
        assert len(read(name, which.cropped(60), limit)) in (8, 11, 16)
        assert read(name, which, limit) != list(range(limit))


@pytest.mark.parametrize("name", baselines.names())
def test_a_query_that_is_no_number_is_answered(name: str) -> None:
    which = indexed(name, clustered())
    nan = torch.full_like(QUERY, torch.nan)
    clusters, entries = selectors.resolve(name)(nan, which, 30, CONFIG)
    assert index.members_of(which.offsets, which.members, clusters, entries).numel() >= 20


# ---- summaries that grow and follow


@pytest.mark.parametrize("name", SUMMARIES)
def test_a_grown_summary_is_that_of_all_entries(name: str) -> None:
    make: Any = selectors.summary_of(selectors.resolve(name))
    of, more = clustered(), clustered(40, seed=5)
    together = Clustered(
        torch.cat([of.keys, more.keys], 1),
        torch.cat([of.offsets, more.offsets[1:] + of.offsets[-1]]),
        torch.cat([of.members, more.members + ENTRIES]),
        None,
        LATE,
    )
    first = make(of, CONFIG)
    grown, expected = tensors(first.grown(more)), tensors(first.alike(together))
    assert grown.keys() == expected.keys()
    for part, tensor in grown.items():
        assert torch.equal(tensor, expected[part]), part
    assert first.grown(more).nbytes == sum(tensor.nbytes for tensor in grown.values())
    assert first.grown(more).nbytes > first.nbytes
    other = tensors(first.grown(dataclasses.replace(more, keys=-more.keys)))
    assert any(not torch.equal(tensor, other[part]) for part, tensor in grown.items())


@pytest.mark.parametrize("name", SUMMARIES)
def test_a_summary_follows_clusters_that_are_made_anew(name: str) -> None:
    """Of three lots of entries, the clusters of the middle one give way to fewer."""
    make: Any = selectors.summary_of(selectors.resolve(name))
    lots = [clustered(40, seed=seed) for seed in range(3)]
    anew = dataclasses.replace(lots[1], offsets=torch.tensor([0, 25, 42]).int())
    before = make(lots[0], CONFIG).grown(lots[1]).grown(lots[2])
    first, last = lots[0].clusters, lots[0].clusters + lots[1].clusters
    got = tensors(before.replaced(first, last, before.alike(anew)))
    for part, tensor in tensors(make(lots[0], CONFIG).grown(anew).grown(lots[2])).items():
        assert torch.equal(tensor, got[part]), part


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", SUMMARIES)
def test_any_dtype(name: str, dtype: torch.dtype) -> None:
    of = clustered()
    given = dataclasses.replace(of, keys=of.keys.to(dtype), queries=LATE.to(dtype))
    got = read(name, indexed(name, given), 30)
    alike = set(got) & set(read(name, indexed(name, of), 30))
    assert len(alike) >= 0.8 * len(got)


# ---- whole baselines


@pytest.mark.parametrize("name", baselines.names())
def test_settings_make_a_config(name: str) -> None:
    config = SwarmConfig(paths="/nowhere", sparsity=0.2, **baselines.settings(name))
    assert config.selector == name
    assert name in selectors.names()
    assert SwarmConfig.from_dict(config.to_dict()) == config
    baselines.settings(name)["block"] = 7
    assert baselines.settings(name)["block"] != 7


def test_an_unknown_baseline() -> None:
    with pytest.raises(ArgumentError, match=r"unknown baseline \('h2o'\); choose one of \['clus"):
        baselines.settings("h2o")
    assert {"oracle", "infllm", "pqcache", "quest"} < set(baselines.names())
