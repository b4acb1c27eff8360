"""One vector per cluster and KV head, of which methods differ in what they make it of."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..config import SwarmConfig
from ..summary import Clustered, half

if TYPE_CHECKING:
    from typing import Self


@dataclasses.dataclass(frozen=True)
class ClusterVectors:
    """Summary by clusters.

    Attributes:
        vectors: float16 [kv_heads, clusters, features].
    """

    vectors: torch.Tensor

    def represent(self, of: Clustered) -> torch.Tensor:
        """Vectors [kv_heads, clusters, features] of clusters, in any float dtype."""
        raise NotImplementedError

    @classmethod
    def build(cls, of: Clustered, config: SwarmConfig) -> Self:
        """Of the first clusters."""
        return cls(of.keys.new_empty(of.keys.shape[0], 0, 0)).alike(of)

    @property
    def nbytes(self) -> int:
        """Bytes of the vectors."""
        return self.vectors.nbytes

    def alike(self, of: Clustered) -> Self:
        """That of other clusters."""
        return dataclasses.replace(self, vectors=half(self.represent(of)))

    def replaced(self, first: int, last: int, others: Self) -> Self:
        """With the vectors of `others` in the place of those of clusters `first` to `last`."""
        parts = [self.vectors[:, :first], others.vectors, self.vectors[:, last:]]
        return dataclasses.replace(self, vectors=torch.cat(parts, 1))

    def grown(self, more: Clustered) -> Self:
        """With those of further clusters."""
        vectors = torch.cat([self.vectors, self.alike(more).vectors], 1)
        return dataclasses.replace(self, vectors=vectors)


def reduced(reduce: np.ufunc, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """float32 [kv_heads, clusters, features]: `reduce` over the rows of each cluster.

    Args:
        reduce: such as `np.maximum`.
        rows: [kv_heads, n, features], floating, cluster by cluster.
        offsets: of the clusters among the rows, int [clusters + 1]; none is empty.
    """
    clustered = rows.float().contiguous().numpy()
    return torch.from_numpy(reduce.reduceat(clustered, offsets[:-1].numpy(), axis=1))


def means(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """float32 [kv_heads, clusters, features]: mean of the rows of each cluster, see `reduced`."""
    return reduced(np.add, rows, offsets) / offsets.diff()[:, None]
