"""Keys of eight groups of entries, scattered over the sequence, and queries that look for some."""

from __future__ import annotations

import torch

GROUPS, DIM = 8, 32


class Groups:
    """The keys of `tokens` tokens: near the centre of their group.

    Attributes:
        random: for what the caller draws before `activity`.
        centres: [groups, dim], of length 1.
        k: [1, tokens, dim].
    """

    def __init__(self, tokens: int) -> None:
        self.random = torch.Generator().manual_seed(2)
        centres = torch.randn(GROUPS, DIM, generator=self.random)
        self.centres = torch.nn.functional.normalize(centres, dim=-1)
        group = torch.randint(GROUPS, (tokens,), generator=self.random)
        noise = torch.randn(1, tokens, DIM, generator=self.random) * 0.15
        self.k = self.centres[group][None] + noise

    def activity(self, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [2, tokens, dim] of queries that look for `wanted` [tokens, dim], and k and v."""
        noise = torch.randn(2, *wanted.shape, generator=self.random)
        q = 12 * wanted[None].repeat(2, 1, 1) + noise
        return q, self.k, torch.randn(self.k.shape, generator=self.random)
