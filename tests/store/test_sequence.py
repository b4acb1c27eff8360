"""A sequence's life beside the invariants: profiles, what is refused, and estimates."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm_kv import ops, selectors
from swarm_kv.errors import ArgumentError
from swarm_kv.index import members_of
from swarm_kv.means import ClusterMeans
from swarm_kv.sequence import Geometry, Sequence

from .helpers import open_store

HEADS, KV_HEADS, DIM = 4, 2, 16
GEOMETRY = Geometry(HEADS, KV_HEADS, DIM, torch.float32, DIM**-0.5)
SINKS, WINDOW, FLUSH = 2, 16, 8


def sequence_of(**changes: Any) -> Sequence:
    small = {"sparsity": 0.2, "window": WINDOW, "sinks": SINKS, "flush": FLUSH, "block": 4}
    store = open_store(["/a"], **{"engine": "memory", "min_activation": 2, **small, **changes})
    return Sequence(store, GEOMETRY, "layer 0", selectors.resolve(store.config.selector))


def tokens(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and queries that attend to a few tokens each."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, KV_HEADS, count, DIM, generator=generator)
    q = 3 * torch.randn(HEADS, count, DIM, generator=generator)
    return k, v, q


def part(of: tuple[Tensor, Tensor, Tensor], first: int, last: int) -> Any:
    return tuple(tensor[:, first:last] for tensor in of)


def lse_of(k: Tensor, q: Tensor) -> Tensor:
    """[heads, n]: log-sum-exp of each token's scaled scores up to itself."""
    scores = GEOMETRY.scale * q @ k.repeat_interleave(HEADS // KV_HEADS, 0).mT
    count = k.shape[1]
    later = torch.ones(count, count, dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf).logsumexp(-1)


def layout_of(sequence: Sequence) -> tuple[list[int], list[int]]:
    assert sequence.stored is not None
    index = sequence.stored.index
    return index.offsets.tolist(), index.members.tolist()


# ---- profiles


@pytest.mark.parametrize("clusterer", ["hypergraph", "swarm"])
@pytest.mark.parametrize("chunks", [(200,), (120, 80), (90, 60, 50)])
def test_what_attention_knows_need_not_be_computed_again(
    chunks: tuple[int, ...], clusterer: str
) -> None:
    def laid_out(given: bool, wrong: float = 0.0) -> tuple[list[int], list[int]]:
        sequence = sequence_of(layout="clusters", clusterer=clusterer)
        data = tokens(200)
        lse = lse_of(data[0], data[2])
        # Heads that shrink by different amounts agree on other entries.
        lse[1:] += wrong
        for first, last in itertools.pairwise([0, *itertools.accumulate(chunks)]):
            sequence.ingest(*part(data, first, last), lse[:, first:last] if given else None)
        sequence.prepare()
        return layout_of(sequence)

    assert laid_out(True) == laid_out(False)
    assert laid_out(True, wrong=5.0) != laid_out(False)


@pytest.mark.parametrize("layout", ["auto", "clusters", "sequence"])
def test_a_profile_of_one_query(layout: str) -> None:
    """There was none to judge with, which was an error; and in chunks none is left at all."""
    sequence = sequence_of(layout=layout, profile_queries=1)
    data = tokens(200)
    for first, last in ((0, 100), (100, 200)):
        sequence.ingest(*part(data, first, last))
        assert sequence.stored is not None
    sequence.prepare()
    assert torch.equal(sequence.read_all()[0], data[0][:, SINKS : 200 - WINDOW])


def test_a_crop_that_takes_the_whole_profile_along() -> None:
    """Codes were trained for the mean of no query, which is not a number."""
    sequence = sequence_of(profile_queries=16)
    data = tokens(200)
    for first, last in ((0, 100), (100, 200)):
        sequence.ingest(*part(data, first, last))
    sequence.crop(60)
    sequence.prepare()
    assert sequence.stored is not None
    assert sequence.stored.index.codebook.turn.isfinite().all()
    assert torch.equal(sequence.read_all()[0], data[0][:, SINKS:140])


def test_shorter_than_the_window() -> None:
    sequence = sequence_of()
    data = tokens(SINKS + WINDOW + FLUSH)
    sequence.ingest(*part(data, 0, 3))
    sequence.ingest(*part(data, 3, SINKS + WINDOW + FLUSH - 1))
    sequence.prepare()
    assert sequence.stored is None
    assert sequence.index() is None
    assert len(sequence.window) == WINDOW + FLUSH - 1
    assert sequence.store.counters()["stored_bytes"] == 0
    # One more, and what is more than the window leaves it.
    sequence.ingest(*part(data, SINKS + WINDOW + FLUSH - 1, SINKS + WINDOW + FLUSH))
    assert (sequence.limit, len(sequence.window)) == (FLUSH, WINDOW)


@pytest.mark.parametrize("layout", ["auto", "clusters"])
def test_an_index_cap_that_leaves_no_room(layout: str) -> None:
    sequence = sequence_of(layout=layout, max_index_bytes=8)
    data = tokens(200)
    sequence.ingest(*data)
    assert torch.equal(sequence.read_all()[0], data[0][:, SINKS : 200 - WINDOW])
    index = sequence.index()
    assert index is not None
    if layout == "clusters":
        assert index.offsets.tolist() == [0]
    query = data[2][:, -1:] * GEOMETRY.scale
    clusters, entries = sequence.selector(query, index, 20, sequence.config)
    assert len(members_of(index.offsets, index.members, clusters, entries)) == 20


# ---- refusals


@pytest.mark.parametrize("where", ["keys", "queries"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("layout", ["auto", "clusters", "sequence"])
def test_numbers_that_cannot_be_grouped(where: str, value: float, layout: str) -> None:
    """NaN was an error of LAPACK, and what overflows when squared the end of the process."""
    sequence = sequence_of(layout=layout)
    data = tokens(200)
    (data[0] if where == "keys" else data[2])[1, 190 if where == "queries" else 50, 3] = value
    with pytest.raises(ArgumentError, match=rf"^{where} must be finite and at most 1e\+15, got"):
        sequence.ingest(*data)
    assert sequence.stored is None
    counters = sequence.store.counters()
    assert (counters["stored_bytes"], counters["dram"]["index"]) == (0, 0)
    # What can be is stored.
    (data[0] if where == "keys" else data[2]).nan_to_num_(0.0, 0.0, 0.0).clamp_(-10, 10)
    sequence.ingest(*data)
    assert sequence.stored is not None


def test_numbers_that_cannot_be_trained_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_kv.recode.LEAST", 16)
    sequence = sequence_of()
    sequence.ingest(*tokens(200))
    assert sequence.stored is not None
    codebook = sequence.stored.index.codebook
    k, v, _ = tokens(250, seed=1)
    k[:, ::5] = torch.nan
    for token in range(60):
        sequence.append(k[:, token : token + 1], v[:, token : token + 1])
        sequence.settle()
    assert sequence.store.background.failures
    assert sequence.stored.index.codebook is codebook


# ---- estimates of what is not fetched


def topics(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Runs of ten tokens that are nearly alike."""
    k, v, q = tokens(count)
    run = torch.arange(count) // 10
    return k[:, run] + 0.3 * k, v[:, run] + 0.3 * v, q


def attend(query: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = query @ k.repeat_interleave(HEADS // KV_HEADS, 0).mT
    return scores.softmax(-1) @ v.repeat_interleave(HEADS // KV_HEADS, 0), scores.logsumexp(-1)


def check_means(sequence: Sequence) -> None:
    """They are those of the entries that are stored, whatever happened before."""
    assert sequence.stored is not None
    means = sequence.stored.means
    assert means is not None
    keys, values = sequence.read_all()
    assert means.sizes.sum() == len(means.group_of) == sequence.stored.entries
    group_of = means.group_of[: sequence.limit].long()
    whole = torch.bincount(group_of, minlength=len(means.sizes)) == means.sizes
    assert whole.any()
    for ours, theirs in ((means.keys, keys), (means.values, values)):
        for group in whole.nonzero()[:, 0].tolist():
            expected = theirs[:, group_of == group].mean(1)
            torch.testing.assert_close(ours[:, group].float(), expected, rtol=2e-3, atol=2e-3)


GROWTH = ["whole", "chunks", "chunks and relay", "flush", "crop", "crop and flush", "fork"]


def grown(how: str, **changes: Any) -> Sequence:
    sequence = sequence_of(**{"estimate_unfetched": True, **changes})
    data = topics(260)
    if how == "whole":
        sequence.ingest(*part(data, 0, 200))
        return sequence
    for first, last in ((0, 100), (100, 150), (150, 200)):
        sequence.ingest(*part(data, first, last))
    if how != "chunks":
        sequence.prepare()
    if how == "flush":
        for token in range(200, 230):
            sequence.append(*part(data, token, token + 1)[:2])
            sequence.settle()
    if how.startswith("crop"):
        sequence.crop(50)
    if how == "crop and flush":
        sequence.append(*part(data, 150, 230)[:2])
        sequence.settle()
    if how == "fork":
        other = sequence.fork()
        k, v, _ = part(data, 200, 230)
        other.append(k.flip(1), v.flip(1))
        other.settle()
        sequence.append(k, v)
        sequence.settle()
        check_means(other)
        assert other.stored is not sequence.stored
    return sequence


@pytest.mark.parametrize("layout", ["clusters", "sequence"])
@pytest.mark.parametrize("how", GROWTH)
def test_estimates_follow_every_way_of_growing(
    how: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_kv.sequence.MEANS_BLOCK", 4)  # so that some hundred entries do
    sequence = grown(how, layout=layout, max_size=8)
    check_means(sequence)
    assert sequence.stored is not None
    assert sequence.stored.means is not None
    # Against attention to everything, with a few entries fetched.
    keys, values = sequence.read_all()
    query = torch.randn(HEADS, 1, DIM, generator=torch.Generator().manual_seed(3))
    best = torch.topk((query @ keys.repeat_interleave(2, 0).mT).mean((0, 1)), 20).indices
    fetched = attend(query, keys[:, best], values[:, best])
    out, lse = sequence.estimate(sequence.stored.means, query, best, None, None)
    merged = ops.merge_attention(*fetched, out.transpose(0, 1), lse.T)
    for with_estimate, without, right in zip(
        merged, fetched, attend(query, keys, values), strict=True
    ):
        assert (with_estimate - right).norm() < 0.7 * (without - right).norm()
    # Everything fetched: nothing to estimate.
    _, none = sequence.estimate(
        sequence.stored.means, query, torch.arange(sequence.limit), None, None
    )
    assert (none == -torch.inf).all()


def test_what_a_mask_hides_is_not_estimated() -> None:
    sequence = grown("crop")
    assert sequence.stored is not None
    assert sequence.stored.means is not None
    visible = torch.ones(len(sequence), dtype=torch.bool)
    visible[10:40] = False
    query = torch.randn(HEADS, 1, DIM, generator=torch.Generator().manual_seed(3))
    fetched = torch.arange(60, 90)
    masked = sequence.estimate(sequence.stored.means, query, fetched, visible, None)
    hidden = torch.cat([torch.arange(10 - SINKS, 40 - SINKS), fetched])
    expected = sequence.estimate(sequence.stored.means, query, hidden, None, None)
    torch.testing.assert_close(masked, expected)
    everything = sequence.estimate(sequence.stored.means, query, fetched, None, None)
    assert not torch.allclose(masked[1], everything[1])


def test_estimates_are_charged() -> None:
    with_means, without = (grown("flush", estimate_unfetched=on) for on in (True, False))
    assert with_means.stored is not None
    assert with_means.stored.means is not None
    held, less = (s.store.counters()["dram"]["index"] for s in (with_means, without))
    assert held - less >= with_means.stored.means.nbytes


def test_means_are_the_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control for `check_means`: the means of other entries are not these."""
    build = ClusterMeans.build
    monkeypatch.setattr(
        ClusterMeans, "build", lambda k, v, *lists: build(k.flip(1), v.flip(1), *lists)
    )
    with pytest.raises(AssertionError):
        check_means(grown("whole", layout="clusters"))
