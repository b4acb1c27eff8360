"""The index: its parts and their bytes, its summary, growing."""

import math

import pytest
import torch

from swarm_kv import codes, index, ops
from swarm_kv.errors import ArgumentError
from swarm_kv.medoids import Medoids
from swarm_kv.summary import Clustered

HEADS, KV_HEADS, DIM = 4, 2, 16


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


OFFSETS, MEMBERS = int32(0, 3, 5, 6), int32(4, 0, 1, 2, 0, 5, 3, 6)  # 3 and 6 are loose


def some_keys(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(KV_HEADS, count, DIM, generator=torch.Generator().manual_seed(seed))


def some_index(bits: int = 16) -> index.Index:
    keys = some_keys(7)
    medoids = Medoids.build(keys, OFFSETS, MEMBERS, bits=bits)
    return index.build(codes.train(keys, 4), keys, OFFSETS, MEMBERS, medoids)


def test_medoids_are_keys() -> None:
    keys = some_keys(7)
    medoids = Medoids.build(keys, OFFSETS, MEMBERS)
    assert torch.equal(medoids.keys, keys[:, [4, 2, 5]].half())
    query = torch.randn(HEADS, 2, DIM)
    expected = ops.score_clusters(query, keys[:, [4, 2, 5]].half(), 1.0)
    assert torch.equal(medoids.score(query), expected)


def test_weighted_means() -> None:
    keys = some_keys(7)
    weights = torch.tensor([1.0, 3.0, 0.0, 9.0, 4.0, 0.0, 9.0])
    means = Medoids.build(keys, OFFSETS, MEMBERS, weights, "weighted_mean").keys.float()
    first = (4 * keys[:, 4] + keys[:, 0] + 3 * keys[:, 1]) / 8
    expected = torch.stack([first, keys[:, 0], keys[:, 5]], dim=1)  # no weight at all: plain mean
    torch.testing.assert_close(means, expected, rtol=1e-3, atol=1e-3)
    alike = Medoids.build(keys, OFFSETS, MEMBERS, None, "weighted_mean").keys.float()
    torch.testing.assert_close(alike[:, 0], keys[:, [4, 0, 1]].mean(1), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(alike[:, 0], means[:, 0], rtol=1e-3, atol=1e-3)


def decoded(medoids: Medoids) -> torch.Tensor:
    assert medoids.scales is not None
    assert medoids.zeros is not None
    steps = torch.cat([medoids.keys & 15, medoids.keys >> 4], dim=-1)
    return steps * medoids.scales[:, None] + medoids.zeros[:, None]


def test_four_bits() -> None:
    keys = some_keys(200)
    offsets, members = index.sequence_blocks(200, 2)
    coded = Medoids.build(keys, offsets, members, bits=4)
    plain = Medoids.build(keys, offsets, members)
    assert coded.scales is not None
    error = (decoded(coded) - plain.keys.float()).abs() / coded.scales[:, None]
    assert error.max() < 0.51
    assert coded.nbytes == KV_HEADS * (100 * DIM // 2 + 2 * 4 * DIM)
    assert plain.nbytes == KV_HEADS * 100 * DIM * 2
    query = torch.randn(HEADS, 1, DIM)
    expected = ops.score_clusters(query, decoded(coded), 1.0)  # the zeros drop out
    torch.testing.assert_close(coded.score(query), expected, rtol=1e-4, atol=1e-8)
    assert not torch.allclose(coded.score(query), plain.score(query), rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("representative", ["medoid", "weighted_mean"])
def test_medoids_grow(bits: int, representative: str) -> None:
    keys, more = some_keys(7), some_keys(4, 1)
    offsets, members = index.sequence_blocks(4, 2)
    grown = Medoids.build(keys, OFFSETS, MEMBERS, None, representative, bits).grown(
        Clustered(more, offsets, members)
    )
    at_once = Medoids.build(
        torch.cat([keys, more], 1), int32(0, 3, 5, 6, 8, 10), int32(4, 0, 1, 2, 0, 5, 7, 8, 9, 10),
        None, representative, bits,
    )  # fmt: skip
    if bits == 16:
        assert torch.equal(grown.keys, at_once.keys)
    else:
        assert grown.keys.shape == at_once.keys.shape
        assert torch.equal(grown.keys[:, :3], Medoids.build(
            keys, OFFSETS, MEMBERS, None, representative, bits
        ).keys)  # fmt: skip
        fresh = more.view(KV_HEADS, 2, 2, DIM)
        wanted = fresh[:, :, 0] if representative == "medoid" else fresh.mean(2)
        assert grown.scales is not None
        assert grown.zeros is not None
        low, high = grown.zeros[:, None], grown.zeros[:, None] + 15 * grown.scales[:, None]
        clamped = wanted.maximum(low).minimum(high)
        error = (decoded(grown)[:, 3:] - clamped).abs() / grown.scales[:, None]
        assert error.max() < 0.51


def test_medoid_errors() -> None:
    keys = some_keys(7)
    with pytest.raises(ArgumentError, match=r"unknown representative .*choose one of"):
        Medoids.build(keys, OFFSETS, MEMBERS, None, "centroid")
    with pytest.raises(ArgumentError, match=r"medoid bits \(8\) must be one of"):
        Medoids.build(keys, OFFSETS, MEMBERS, bits=8)
    with pytest.raises(ArgumentError, match="need an even head size, not 15"):
        Medoids.build(keys[..., :15], OFFSETS, MEMBERS, bits=4)


def test_bytes_by_part() -> None:
    built = some_index()
    parts = built.bytes_by_part()
    assert parts == {
        "codes": KV_HEADS * 4 * 7,
        "codebook": KV_HEADS * (4 * 256 * DIM + 2 * DIM * DIM),
        "clusters": 4 * (4 + 8 + 3),
        "summary": 2 * KV_HEADS * 3 * DIM,
    }
    assert built.nbytes() == sum(parts.values())
    per_entry = built.bytes_per_entry()
    assert math.isclose(per_entry["total"], built.nbytes() / 7)
    assert per_entry["codes"] == KV_HEADS * 4
    four = some_index(bits=4).bytes_by_part()
    assert four["summary"] == KV_HEADS * (3 * DIM // 2 + 8 * DIM)
    keys = some_keys(7)
    without = index.build(codes.train(keys, 4), keys, OFFSETS, MEMBERS)
    assert without.summary is None
    assert without.bytes_by_part() == {**parts, "summary": 0}


def test_a_selector_finds_its_own_kind_of_summary() -> None:
    built = some_index()
    assert built.known(Medoids) is built.summary
    with pytest.raises(ArgumentError, match=r"ranks by Codebook, but .* is Medoids: make it with"):
        built.known(codes.Codebook)
    with pytest.raises(ArgumentError, match="summary of this index is none"):
        built.laid_out(OFFSETS, MEMBERS, None).known(Medoids)


def test_growing_keeps_loose_entries_loose() -> None:
    """They would otherwise become members of the first cluster that is appended."""
    more = some_keys(5, 1)
    grown = some_index().grown(Clustered(more, int32(0, 2, 4), int32(1, 0, 3, 2, 4)))
    lists = [
        grown.members[a:b].tolist()
        for a, b in zip(grown.offsets[:-1], grown.offsets[1:], strict=True)
    ]
    assert lists == [[4, 0, 1], [2, 0], [5], [8, 7], [10, 9]]
    assert grown.members[int(grown.offsets[-1]) :].tolist() == [3, 6, 11]
    assert grown.offsets.dtype == grown.members.dtype == torch.int32
    assert (grown.entries, grown.limit) == (12, 12)
    assert torch.equal(grown.known(Medoids).keys[:, 3:], more[:, [1, 3]].half())
    assert torch.equal(grown.codes[..., 7:], grown.codebook.encode(more))


def test_a_cropped_index_gives_nothing_beyond_its_limit() -> None:
    query = torch.randn(HEADS, 1, DIM)
    built = some_index()
    assert (built.probabilities(query) > 0).all()
    cropped = built.cropped(4).probabilities(query)
    assert (cropped[4:] == 0).all()
    assert torch.equal(cropped[:4], built.probabilities(query)[:4])


def test_clusters_in_reach_keep_their_numbers() -> None:
    built = some_index()
    assert built.in_reach() == (built.offsets, built.members)
    offsets, members = built.cropped(4).in_reach()
    assert (offsets.tolist(), members.tolist()) == ([0, 2, 4, 4], [0, 1, 2, 0, 3])
    assert offsets.dtype == members.dtype == torch.int32
