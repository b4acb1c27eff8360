"""InfLLM (arXiv 2402.04617): blocks ranked by a few tokens that were attended to most."""

from __future__ import annotations

import dataclasses

import torch

from ..config import SwarmConfig
from ..index import Index
from ..selectors import Selection, selector
from ..summary import Clustered, half
from .ranking import whole_clusters
from .vectors import ClusterVectors, means

BLOCK = 128
"""Entries per block, as in the original."""
REPRESENTATIVES = 4
"""Tokens that stand for a block, as in the original."""


@dataclasses.dataclass(frozen=True)
class Representatives(ClusterVectors):
    """Mean key of the few members of each cluster that recent queries score highest.

    A token's score is the mean product with queries, as in the paper, of the profile or, for what
    leaves the window, of recent steps. The original takes the queries that follow the token in its
    window of 4096, per query head, and scores keys that positions have not rotated yet.

    Attributes:
        asked: float32 [kv_heads, head_dim], mean of the queries that representatives were chosen
            by; stands in where none are known. Before any are, it is 0, and a cluster's first
            members represent it.
    """

    asked: torch.Tensor

    @classmethod
    def build(cls, of: Clustered, config: SwarmConfig) -> Representatives:
        """Of the first clusters."""
        heads, _, size = of.keys.shape
        return cls(torch.empty(heads, 0, size), torch.zeros(heads, size)).alike(of)

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return self.vectors.nbytes + self.asked.nbytes

    def represent(self, of: Clustered) -> torch.Tensor:
        """[kv_heads, clusters, head_dim]."""
        keys, cluster_of = of.keys[:, of.clustered.long()].float(), of.cluster_of
        strength = torch.einsum("hd,hnd->hn", self.asked, keys)
        by_strength = strength.argsort(dim=1, descending=True, stable=True)
        order = by_strength.gather(1, cluster_of[by_strength].argsort(dim=1, stable=True))
        rank = torch.arange(len(cluster_of)) - of.offsets.long()[cluster_of]
        chosen = order[:, rank < REPRESENTATIVES, None].expand(-1, -1, keys.shape[2])
        counts = of.offsets.diff().clamp(max=REPRESENTATIVES)
        return means(keys.gather(1, chosen), torch.nn.functional.pad(counts.cumsum(0), (1, 0)))

    def alike(self, of: Clustered) -> Representatives:
        """That of other clusters, chosen by the queries that come with them."""
        chooser = self
        if of.queries is not None and of.queries.shape[1]:
            mean = _by_kv_head(of.queries, len(self.asked)).mean(1)
            if mean.isfinite().all():
                chooser = dataclasses.replace(self, asked=mean)
        return dataclasses.replace(chooser, vectors=half(chooser.represent(of)))

    def score(self, query: torch.Tensor) -> torch.Tensor:
        """float32 [clusters]: query times representatives, summed over heads and queries."""
        sums = _by_kv_head(query, len(self.asked)).sum(1)
        return torch.einsum("hd,hcd->c", sums, self.vectors.float())


def _by_kv_head(queries: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """float32 [kv_heads, n, head_dim]: all queries of the heads that share each KV head."""
    return queries.float().reshape(kv_heads, -1, queries.shape[2])


@selector("infllm", summary=Representatives.build)
def infllm(query: torch.Tensor, index: Index, budget: int, config: SwarmConfig) -> Selection:
    """Clusters whose representatives score highest. The original takes blocks of 128 tokens.

    Like it, this sums products over heads, without a softmax: heads share a selection there, too.

    Args:
        query: [heads, queries, head_dim], scaled.
        index: of the stored entries.
        budget: entries to read.
        config: not looked at.
    """
    return whole_clusters(index.known(Representatives).score(query), index, budget)
