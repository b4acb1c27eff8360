"""Quest (arXiv 2406.10774): pages ranked by a bound of what their keys can score."""

from __future__ import annotations

import numpy as np
import torch

from .. import ops
from ..config import SwarmConfig
from ..index import Index
from ..selectors import Selection, selector
from ..summary import Clustered
from .ranking import whole_clusters
from .vectors import ClusterVectors, reduced

PAGE = 16
"""Entries per page, as in the original."""


class Bounds(ClusterVectors):
    """Greatest and least value of each feature of a cluster's keys, one behind the other.

    The greatest product that a query can have with a key in between takes the greatest value where
    the query is positive and the least one where it is negative: one product, twice as long.
    """

    def represent(self, of: Clustered) -> torch.Tensor:
        """[kv_heads, clusters, 2 * head_dim]."""
        keys = of.keys[:, of.clustered.long()]
        bounds = [reduced(reduce, keys, of.offsets) for reduce in (np.maximum, np.minimum)]
        return torch.cat(bounds, 2)

    def score(self, query: torch.Tensor) -> torch.Tensor:
        """float32 [clusters]: softmax of the bounds, mean over heads and queries."""
        signs = torch.cat([query.clamp(min=0), query.clamp(max=0)], 2)
        return ops.score_clusters(signs, self.vectors, 1.0)


@selector("quest", summary=Bounds.build)
def quest(query: torch.Tensor, index: Index, budget: int, config: SwarmConfig) -> Selection:
    """Clusters of greatest bound. The original takes pages of 16 tokens, per head.

    Args:
        query: [heads, queries, head_dim], scaled.
        index: of the stored entries.
        budget: entries to read.
        config: not looked at.
    """
    return whole_clusters(index.known(Bounds).score(query), index, budget)
