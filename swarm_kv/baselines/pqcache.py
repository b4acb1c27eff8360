"""PQCache (arXiv 2407.12820): keys in a few bits by product quantisation, entries one by one."""

from __future__ import annotations

import dataclasses

import torch

from .. import codes, ops
from ..config import SwarmConfig
from ..index import Index
from ..selectors import Selection, selector
from ..summary import Clustered
from .ranking import best_entries

PARTS = 2
"""Sub-vectors per head, as in the original's scripts."""
BITS = 6
"""Bits per sub-vector, as in the original's scripts."""
ITERATIONS = 25


@dataclasses.dataclass(frozen=True)
class Quantised:
    """Summary by entries: for each sub-vector of a key, the nearest of 64 centroids.

    Centroids are fitted to the keys of the context and stay, as in the original.

    Attributes:
        centroids: float32 [kv_heads, PARTS, 2 ** BITS, head_dim / PARTS].
        codes: uint8 [kv_heads, PARTS, entries].
    """

    centroids: torch.Tensor
    codes: torch.Tensor

    @classmethod
    def build(cls, of: Clustered, config: SwarmConfig) -> Quantised:
        """Of the first entries.

        Raises:
            ArgumentError: the head size is odd, or a key is no number.
        """
        centroids = codes.fit(of.keys, PARTS, BITS, ITERATIONS)
        return cls(centroids, _encode(centroids, of.keys))

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return self.centroids.nbytes + self.codes.nbytes

    def alike(self, of: Clustered) -> Quantised:
        """Those of other entries, by the same centroids."""
        return Quantised(self.centroids, _encode(self.centroids, of.keys))

    def replaced(self, first: int, last: int, others: Quantised) -> Quantised:
        """The same: clusters are nothing to it."""
        return self

    def grown(self, more: Clustered) -> Quantised:
        """With those of further entries, by the same centroids."""
        return dataclasses.replace(self, codes=torch.cat([self.codes, self.alike(more).codes], 2))

    def score(self, query: torch.Tensor) -> torch.Tensor:
        """float32 [entries]: softmax of query times quantised key, mean over heads and queries."""
        return ops.score_codes(query, self.centroids, self.codes, 1.0)


def _encode(centroids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    parts = keys.float().reshape(*keys.shape[:2], centroids.shape[1], -1).transpose(1, 2)
    distances = torch.cdist(parts, centroids)
    return distances.argmin(3).to(torch.uint8)


@selector("pqcache", summary=Quantised.build)
def pqcache(query: torch.Tensor, index: Index, budget: int, config: SwarmConfig) -> Selection:
    """The strongest entries by their quantised keys. The original sums over a KV head's own heads.

    Args:
        query: [heads, queries, head_dim], scaled.
        index: of the stored entries.
        budget: entries to read.
        config: not looked at.
    """
    return best_entries(index.known(Quantised).score(query), index, budget)
