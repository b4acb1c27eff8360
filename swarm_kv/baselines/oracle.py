"""The paper's No Cluster: every key is scored exactly, and the best entries are read one by one.

A ceiling and no practical system: keys are held in memory, and each step looks at all of them.
"""

from __future__ import annotations

import dataclasses

import torch

from .. import ops
from ..config import SwarmConfig
from ..index import Index
from ..selectors import Selection, selector
from ..summary import Clustered
from .ranking import best_entries


@dataclasses.dataclass(frozen=True)
class Keys:
    """Summary by entries: all of their keys.

    Attributes:
        keys: [kv_heads, entries, head_dim], as they were given.
    """

    keys: torch.Tensor

    @classmethod
    def build(cls, of: Clustered, config: SwarmConfig) -> Keys:
        """Of the first entries."""
        return cls(of.keys.clone())

    @property
    def nbytes(self) -> int:
        """Bytes of the keys."""
        return self.keys.nbytes

    def alike(self, of: Clustered) -> Keys:
        """Those of other entries."""
        return Keys(of.keys.clone())

    def replaced(self, first: int, last: int, others: Keys) -> Keys:
        """The same: clusters are nothing to it."""
        return self

    def grown(self, more: Clustered) -> Keys:
        """With those of further entries."""
        return Keys(torch.cat([self.keys, more.keys], 1))


@selector("oracle", summary=Keys.build)
def oracle(query: torch.Tensor, index: Index, budget: int, config: SwarmConfig) -> Selection:
    """The entries of greatest exact attention: softmax over stored entries, mean over heads.

    Args:
        query: [heads, queries, head_dim], scaled.
        index: of the stored entries.
        budget: entries to read.
        config: not looked at.
    """
    keys = index.known(Keys).keys[:, : index.limit]
    return best_entries(ops.score_clusters(query, keys, 1.0), index, budget)
