"""What a selector keeps of the stored keys to rank them by.

A summary is made when entries are stored, grows as more of them are, and follows them when they are
grouped anew. Some know clusters (one key for each), some entries (a code for each).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch

from .config import SwarmConfig

HALF_MAX = torch.finfo(torch.float16).max


@dataclasses.dataclass(frozen=True)
class Clustered:
    """Entries in clusters: what a summary is made of.

    Attributes:
        keys: [kv_heads, n, head_dim], floating.
        offsets: int32 [clusters + 1]; no cluster is empty.
        members: int32; cluster c is `members[offsets[c]:offsets[c + 1]]`, its medoid first. What
            follows the last cluster is in none.
        weights: [n], how many queries of a profile activated each; None: not known.
        queries: [heads, m, head_dim], queries that came after most of the entries, in any scale;
            None: none known.
    """

    keys: torch.Tensor
    offsets: torch.Tensor
    members: torch.Tensor
    weights: torch.Tensor | None = None
    queries: torch.Tensor | None = None

    @property
    def clusters(self) -> int:
        """Number of clusters."""
        return self.offsets.numel() - 1

    @property
    def clustered(self) -> torch.Tensor:
        """Members of the clusters, without the loose ones."""
        return self.members[: int(self.offsets[-1])]

    @property
    def cluster_of(self) -> torch.Tensor:
        """int64, the cluster of each of `clustered`."""
        return torch.arange(self.clusters).repeat_interleave(self.offsets.diff())


class Summary(Protocol):
    """What an index knows about stored keys beyond their codes. Immutable."""

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""

    def alike(self, of: Clustered) -> Summary:
        """That of other entries, comparable with this one."""

    def grown(self, more: Clustered) -> Summary:
        """With further entries, in clusters of their own."""

    def replaced(self, first: int, last: int, others: Any) -> Summary:
        """Of the same entries where clusters `first` to `last` have given way to others.

        Args:
            first, last: clusters.
            others: what `alike` gives for the new clusters and the entries that are in them.
        """


Summarise = Callable[[Clustered, SwarmConfig], Summary]
"""Makes the summary of the first entries."""


def half(vectors: torch.Tensor) -> torch.Tensor:
    """In 16 bits; what they cannot hold becomes the largest number that they can."""
    return vectors.clamp(-HALF_MAX, HALF_MAX).half()
