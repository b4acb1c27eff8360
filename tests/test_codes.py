"""Codes of keys: what turning buys, four bits against eight, errors."""

import pytest
import torch

from swarm_kv import codes, ops, reference
from swarm_kv.errors import ArgumentError

HEADS, KV_HEADS, DIM, ENTRIES = 4, 2, 32, 3000


def skewed(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and queries as models have them: few directions hold most of the keys' variance, and
    queries look along others."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.linalg.qr(torch.randn(KV_HEADS, DIM, DIM, generator=generator))[0]
    spread = torch.logspace(1, -1, DIM)
    keys = torch.randn(KV_HEADS, ENTRIES, DIM, generator=generator) * spread @ mix
    turned = torch.randn(KV_HEADS, 400, DIM, generator=generator) / spread.clamp(min=0.3) @ mix
    queries = turned.view(KV_HEADS, HEADS // KV_HEADS, 200, DIM).flatten(0, 1)
    return keys, queries


def recall(book: codes.Codebook, keys: torch.Tensor, query: torch.Tensor) -> float:
    """Mass of the exact attention on the best tenth by codes, of that on the exact best tenth."""
    exact = ops.score_clusters(query, keys, 1.0)
    count = ENTRIES // 10
    found = torch.topk(book.score(query, book.encode(keys)), count).indices
    return float(exact[found].sum() / torch.topk(exact, count).values.sum())


@pytest.mark.parametrize("bits", codes.BITS)
def test_turned_codes_find_more(bits: int) -> None:
    keys, queries = skewed()
    seen, asked = queries[:, :100], queries[:, 100:101]
    by_queries = codes.train(keys, 4, seen, bits)
    by_keys = codes.train(keys, 4, None, bits)
    straight = torch.eye(DIM, dtype=torch.float16).expand(KV_HEADS, DIM, DIM)
    plain = codes.retrain(codes.Codebook(by_keys.centroids, straight, 0), keys)
    found = [recall(book, keys, asked) for book in (by_queries, by_keys, plain)]
    assert found[0] > found[2] + 0.02
    assert found[0] > 0.8


@pytest.mark.parametrize("bits", codes.BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_score_is_that_of_the_decoded_keys(bits: int, dtype: torch.dtype) -> None:
    keys, queries = skewed()
    keys = keys.to(dtype)
    book = codes.train(keys, 4, queries, bits)
    encoded = book.encode(keys)
    assert encoded.shape == (KV_HEADS, 4, ENTRIES)
    assert encoded.dtype == torch.uint8
    numbers = encoded
    if bits == 4:
        numbers = torch.stack([encoded & 15, encoded >> 4], 2).flatten(1, 2)
    decoded = torch.stack(
        [
            torch.cat([c[n.long()] for c, n in zip(*pair, strict=True)], -1)
            for pair in zip(book.centroids, numbers, strict=True)
        ]
    )
    decoded = decoded @ book.turn.float().mT  # back: q . (turn k') = (q turn) . k'
    query = 0.3 * queries[:, :2]
    expected = reference.score_clusters(query, decoded, 1.0)
    tolerance = 1e-3 if bits == 8 else 0.5
    torch.testing.assert_close(book.score(query, encoded), expected, rtol=tolerance, atol=1e-6)
    nearer = (decoded - keys.float()).norm() / keys.float().norm()
    assert nearer < 0.9
    assert (decoded.roll(1, 1) - keys.float()).norm() / keys.float().norm() > nearer + 0.2


def test_more_keys_get_the_codes_they_would_have_had() -> None:
    keys, queries = skewed()
    book = codes.train(keys, 4, queries)
    apart = [book.encode(part) for part in keys.split(700, dim=1)]
    assert torch.equal(torch.cat(apart, -1), book.encode(keys))


def test_retraining_follows_the_keys() -> None:
    keys, queries = skewed()
    moved = keys.flip(-1) + 3
    old = codes.train(keys, 4, queries)
    new = codes.retrain(old, moved)
    assert torch.equal(new.turn, old.turn)
    assert new.trained_on == ENTRIES
    query = queries[:, 150:151]
    assert recall(new, moved, query) > recall(old, moved, query)


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("bits", codes.BITS)
def test_few_and_equal_keys(count: int, bits: int) -> None:
    keys = torch.zeros(KV_HEADS, count, DIM)
    for queries in (None, torch.zeros(HEADS, 2, DIM)):
        book = codes.train(keys, 4, queries, bits)
        scores = book.score(torch.randn(HEADS, 1, DIM), book.encode(keys))
        torch.testing.assert_close(scores, torch.full((count,), 1 / count), rtol=0.01, atol=0)


def test_size() -> None:
    keys, queries = skewed()
    eight, four = codes.train(keys, 4, queries), codes.train(keys, 4, queries, 4)
    assert (eight.bits, four.bits) == (8, 4)
    assert eight.nbytes == 4 * KV_HEADS * (256 * DIM + 0.5 * DIM * DIM)
    assert four.nbytes == 4 * KV_HEADS * (16 * DIM + 0.5 * DIM * DIM)


def test_errors() -> None:
    keys = torch.randn(1, 20, 12)
    with pytest.raises(ArgumentError, match=r"bits \(5\) must be one of \(8, 4\)"):
        codes.train(keys, 4, bits=5)
    with pytest.raises(ArgumentError, match="5 bytes per code are 5 parts of 8 bits"):
        codes.train(keys, 5)
    with pytest.raises(ArgumentError, match=r"parts of 4 bits, which must divide the head size"):
        codes.train(keys, 4, bits=4)
    codes.train(keys, 4)
    with pytest.raises(ArgumentError, match=r"5 parts must divide the head size \(12\)"):
        codes.fit(keys, 5, 6)


def test_no_query_is_as_none() -> None:
    """Such as where a crop took the profile along: the mean of none is not a number."""
    keys, queries = skewed()
    empty, without = codes.train(keys, 4, queries[:, :0]), codes.train(keys, 4)
    assert torch.equal(empty.turn, without.turn)
    assert torch.equal(empty.centroids, without.centroids)
    assert not torch.equal(codes.train(keys, 4, queries).turn, without.turn)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1.1e15])
def test_numbers_that_faiss_cannot_take(value: float) -> None:
    """Distances that overflow end the process."""
    keys, queries = skewed()
    book = codes.train(keys, 4, queries)
    bad_keys, bad_queries = keys.clone(), queries.clone()
    bad_keys[1, 7, 3] = bad_queries[1, 7, 3] = value
    with pytest.raises(ArgumentError, match=r"keys must be finite and at most 1e\+15, got"):
        codes.train(bad_keys, 4, queries)
    with pytest.raises(ArgumentError, match=r"keys must be finite and at most 1e\+15, got"):
        codes.retrain(book, bad_keys)
    with pytest.raises(ArgumentError, match=r"keys must be finite and at most 1e\+15, got"):
        codes.fit(bad_keys, 2, 6)
    with pytest.raises(ArgumentError, match=r"queries must be finite and at most 1e\+15, got"):
        codes.train(keys, 4, bad_queries)


@pytest.mark.parametrize("bits", codes.BITS)
def test_the_largest_numbers(bits: int) -> None:
    keys, queries = skewed()
    keys[:, :100], queries[:, 5] = codes.LARGEST, -codes.LARGEST
    book = codes.train(keys, 4, queries, bits)
    assert book.centroids.isfinite().all()
    assert codes.retrain(book, keys).centroids.isfinite().all()
