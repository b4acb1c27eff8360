"""The recall meter: attention on the fetched entries against the best possible choice."""

from __future__ import annotations

import torch

from .sequence import Sequence


def fetched_and_best_mass(
    sequence: Sequence, query: torch.Tensor, fetched: torch.Tensor, budget: int
) -> tuple[float, float]:
    """Attention mass on the fetched entries, and on the exact top `budget`.

    Reads every stored key, so it is for sampled steps.

    Args:
        sequence: after the step's own entry was appended.
        query: [heads, queries, head_dim], already scaled.
        fetched: int64 numbers of the stored entries that were attended.
        budget: how many entries an oracle may take.

    Returns:
        Means over heads and queries of the two masses; the softmax is over all entries.
    """
    shape = sequence.geometry
    rows = query.reshape(shape.kv_heads, -1, shape.head_dim).float()

    def scores(keys: torch.Tensor) -> torch.Tensor:
        return rows @ keys.float().transpose(-1, -2)

    stored = torch.empty(*rows.shape[:2], sequence.limit)
    for ids, keys, _ in sequence.stream():
        stored[..., ids] = scores(keys)
    resident = scores(sequence.gather(sequence.resident())[0])
    weights = torch.cat([stored, resident], dim=-1).softmax(-1)[..., : sequence.limit].mean((0, 1))
    best = torch.topk(weights, min(budget, sequence.limit)).values.sum()
    return float(weights[fetched].sum()), float(best)
