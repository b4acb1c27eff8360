"""The estimate of what was not fetched."""

import pytest
import torch

from swarm_kv import index, means, ops
from swarm_kv.dense import dense_attention
from swarm_kv.means import ClusterMeans

HEADS, KV_HEADS, DIM = 4, 2, 16
NOTHING = torch.empty(0, dtype=torch.int64)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    group = query.shape[0] // keys.shape[0]
    scores = query @ keys.repeat_interleave(group, 0).mT
    return scores.softmax(-1) @ values.repeat_interleave(group, 0), scores.logsumexp(-1)


def queries(count: int) -> torch.Tensor:
    return torch.randn(HEADS, count, DIM, generator=torch.Generator().manual_seed(1))


def topics(count: int, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs of four entries that are nearly alike."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> torch.Tensor:
        middles = torch.randn(KV_HEADS, count // 4, DIM, generator=generator)
        noise = torch.randn(KV_HEADS, count, DIM, generator=generator)
        return middles.repeat_interleave(4, 1) + spread * noise

    return draw(), draw()


def test_groups_that_are_alike_are_estimated_exactly() -> None:
    keys, values = topics(80, 0.0)
    keys, values = keys.half().float(), values.half().float()
    built = ClusterMeans.build(keys, values, *index.sequence_blocks(80, 4))
    query = queries(3)
    out, lse = built.estimate(query, NOTHING)
    expected = attend(query, keys, values)
    torch.testing.assert_close(out, expected[0], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, expected[1], rtol=2e-3, atol=2e-3)


def test_a_soft_cap_is_the_models() -> None:
    """Its scores end at the cap, so that an estimate without one would drown what was fetched."""
    keys, values = topics(80, 0.0)
    keys, values = keys.half().float(), values.half().float()
    built = ClusterMeans.build(keys, values, *index.sequence_blocks(80, 4))
    query = 3 * queries(3)
    expected = dense_attention(query, keys, values, scale=1.0, causal=False, softcap=2.0)
    torch.testing.assert_close(
        built.estimate(query, NOTHING, softcap=2.0), expected, rtol=2e-3, atol=2e-3
    )
    _, lse = built.estimate(query, NOTHING)
    assert (lse > expected[1] + 1).all()


def test_together_with_what_was_fetched() -> None:
    """Fetched entries are not counted again, nor forgotten ones left out."""
    keys, values = topics(80, 0.0)
    built = ClusterMeans.build(keys, values, *index.sequence_blocks(80, 4))
    query = queries(2)
    fetched = torch.tensor([0, 1, 2, 3, 9, 40, 43])
    part = attend(query, keys[:, fetched], values[:, fetched])
    out, lse = ops.merge_attention(*part, *built.estimate(query, fetched))
    expected = attend(query, keys, values)
    torch.testing.assert_close(out, expected[0], rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(lse, expected[1], rtol=5e-3, atol=5e-3)
    twice, _ = ops.merge_attention(*part, *built.estimate(query, NOTHING))
    assert not torch.allclose(twice, expected[0], rtol=5e-3, atol=5e-3)
    assert not torch.allclose(part[0], expected[0], rtol=5e-3, atol=5e-3)


def test_it_lowers_the_error() -> None:
    keys, values = topics(400, 0.5)
    built = ClusterMeans.build(keys, values, *index.sequence_blocks(400, 4))
    query = queries(16)
    best = torch.topk(ops.score_clusters(query, keys, 1.0), 40).indices
    part = attend(query, keys[:, best], values[:, best])
    merged, _ = ops.merge_attention(*part, *built.estimate(query, best))
    expected, _ = attend(query, keys, values)
    assert (merged - expected).norm() < 0.6 * (part[0] - expected).norm()


def test_each_entry_counts_once() -> None:
    entries = 6 + means.LOOSE_GROUP + 1  # clusters of 0..5 with copies, then loose ones
    offsets = int32(0, 3, 6, 8)
    members = torch.cat([int32(4, 0, 1, 1, 2, 3, 4, 0), torch.arange(5, entries).int()])
    values = torch.randn(KV_HEADS, entries, DIM)
    keys = torch.zeros(KV_HEADS, entries, DIM)
    built = ClusterMeans.build(keys, values, offsets, members)
    # 4, 0, 1 | 2, 3 | the third has nothing of its own | 64 loose ones | the last two
    assert built.sizes.tolist() == [3, 2, means.LOOSE_GROUP, 2]
    assert built.group_of[:6].tolist() == [0, 0, 1, 1, 0, 2]
    out, lse = built.estimate(queries(1), NOTHING)
    torch.testing.assert_close(lse, torch.full_like(lse, entries).log())
    expected = values.mean(1).repeat_interleave(HEADS // KV_HEADS, 0)[:, None]
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)


def test_everything_fetched() -> None:
    keys, values = topics(40, 1.0)
    built = ClusterMeans.build(keys, values, *index.sequence_blocks(40, 4))
    query = queries(2)
    out, lse = built.estimate(query, torch.arange(40))
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    part = attend(query, keys, values)
    merged = ops.merge_attention(*part, out, lse)
    torch.testing.assert_close(merged, part)


@pytest.mark.parametrize("block", [3, 8])
def test_growing(block: int) -> None:
    keys, values = topics(40, 1.0)
    clusters = index.sequence_blocks(40, block)
    built = ClusterMeans.build(keys, values, *clusters)
    grown = built.grown(keys.flip(1), values.flip(1), *clusters)
    assert torch.equal(grown.group_of[40:], built.group_of + len(built.sizes))
    assert grown.nbytes == 2 * built.nbytes
    query = queries(1)
    _, lse = grown.estimate(query, torch.arange(40, 80))
    torch.testing.assert_close(lse, built.estimate(query, NOTHING)[1])
