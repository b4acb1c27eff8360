"""join_clusters against its reference, and its errors."""

import pytest
import torch

from swarm_kv import ops, reference
from swarm_kv.errors import ArgumentError


def random_bits(rows: int, words: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    first, second = (
        torch.randint(-(1 << 62), 1 << 62, (rows, words), generator=generator) for _ in range(2)
    )
    return first & second


@pytest.mark.parametrize("distance", ["jaccard", "conditional", "global"])
@pytest.mark.parametrize("tau", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(("entries", "clusters"), [(20, 15), (0, 3), (3, 0)])
def test_matches_the_reference(distance: str, tau: float, entries: int, clusters: int) -> None:
    bits, medoids = random_bits(entries, 2, 0), random_bits(clusters, 2, 1)
    bits[1:2], medoids[2:3] = 0, 0
    given = (bits, medoids, 128, distance, tau, 3)
    rows, homes = ops.join_clusters(*given)
    expected_rows, expected_homes = reference.join_clusters(*given)
    assert torch.equal(rows, expected_rows)
    assert torch.equal(homes, expected_homes)
    # Not a copy of what any radius gives.
    if tau == 1.0 and entries and clusters:
        assert len(homes) > len(ops.join_clusters(*given[:4], 0.0, 3)[1])


def test_strided_bits() -> None:
    bits, medoids = random_bits(20, 4, 0), random_bits(15, 4, 1)
    strided = ops.join_clusters(bits[:, ::2], medoids[:, ::2], 128)
    for one, other in zip(
        strided,
        ops.join_clusters(bits[:, ::2].contiguous(), medoids[:, ::2].contiguous(), 128),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "join_clusters: steps must be at least 1, got 0"),
        ({"tau": 1.5}, r"join_clusters: tau must be in \[0, 1\], got 1.5"),
        ({"max_replicas": 0}, "join_clusters: max_replicas must be at least 1, got 0"),
        ({"distance": "cosine"}, "cosine.*conditional"),
        ({"medoid_bits": random_bits(3, 1, 0)}, "medoid_bits.*words"),
        ({"bits": torch.zeros(3, 2)}, "bits.*int64"),
    ],
)
def test_errors(change: dict[str, object], message: str) -> None:
    given = {"bits": random_bits(4, 2, 0), "medoid_bits": random_bits(3, 2, 1), "steps": 128}
    with pytest.raises(ArgumentError, match=message):
        ops.join_clusters(**{**given, **change})
