"""ClusterKV (arXiv 2412.03213): clusters of similar keys, ranked by their mean."""

from __future__ import annotations

import torch

from .. import ops
from ..config import SwarmConfig
from ..index import Index
from ..selectors import Selection, selector
from ..summary import Clustered
from .ranking import trimmed_clusters
from .vectors import ClusterVectors, means


class Centroids(ClusterVectors):
    """Mean keys of clusters."""

    def represent(self, of: Clustered) -> torch.Tensor:
        """[kv_heads, clusters, head_dim]."""
        return means(of.keys[:, of.clustered.long()], of.offsets)

    def score(self, query: torch.Tensor) -> torch.Tensor:
        """float32 [clusters]: softmax of query times centroid, mean over heads and queries."""
        return ops.score_clusters(query, self.vectors, 1.0)


@selector("clusterkv", summary=Centroids.build)
def clusterkv(query: torch.Tensor, index: Index, budget: int, config: SwarmConfig) -> Selection:
    """Clusters of the highest scoring centroids; the last one is trimmed to the budget.

    The original clusters each head's keys by their angle, 80 to a cluster, and new ones every 320
    tokens. The baseline's k-means takes the keys of all KV heads together, by their distance, and
    has a centroid for 16 keys, because the original's 80 lose a tenth of the attention on our
    traces (angle or distance is the same).

    Args:
        query: [heads, queries, head_dim], scaled.
        index: of the stored entries.
        budget: entries to read.
        config: not looked at.
    """
    return trimmed_clusters(index.known(Centroids).score(query), index, budget)
