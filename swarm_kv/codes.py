"""Product-quantised codes of keys: a few bytes per key that still tell which keys a query wants.

Each KV head's keys are cut into sub-vectors, and each sub-vector is replaced by the number of the
nearest of 256 centroids (faiss). `swarm_kv.ops.score_codes` scores queries against the codes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import faiss
import numpy as np
import torch

CENTROIDS = 256
ITERATIONS = 4
TRAINING_KEYS = 8192
SEED = 1234
FEW_KEYS = 512
"""Up to here encoding takes less time than starting threads for it."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Codebook:
    """Centroids of one layer.

    Attributes:
        centroids: float32 [kv_heads, parts, 256, head_dim / parts].
        trained_on: number of keys that the centroids were fitted to.
    """

    centroids: torch.Tensor
    trained_on: int

    def encode(self, keys: torch.Tensor) -> torch.Tensor:
        """Codes uint8 [kv_heads, parts, n] of keys [kv_heads, n, head_dim]."""
        heads, parts, _, size = self.centroids.shape

        def encode_head(head: int) -> torch.Tensor:
            quantizer = faiss.ProductQuantizer(parts * size, parts, 8)
            faiss.copy_array_to_vector(self.centroids[head].numpy().ravel(), quantizer.centroids)
            return torch.from_numpy(quantizer.compute_codes(_rows(keys[head])).T.copy())

        if keys.shape[1] <= FEW_KEYS:
            return torch.stack([encode_head(head) for head in range(heads)])
        return torch.stack(_per_head(encode_head, heads))


def train(keys: torch.Tensor, parts: int) -> Codebook:
    """Fit the centroids of each head and part.

    Args:
        keys: [kv_heads, n, head_dim], any float dtype.
        parts: bytes per code and head; divides head_dim.
    """
    heads, count, dim = keys.shape
    sample = keys[:, :: -(-count // TRAINING_KEYS)]
    if sample.shape[1] < CENTROIDS:  # faiss wants a point per centroid; repeated ones do no harm
        sample = sample.repeat(1, -(-CENTROIDS // sample.shape[1]), 1)

    def train_head(head: int) -> torch.Tensor:
        quantizer = faiss.ProductQuantizer(dim, parts, 8)
        quantizer.cp.niter = ITERATIONS
        quantizer.cp.min_points_per_centroid = 1
        quantizer.cp.seed = SEED
        quantizer.train(_rows(sample[head]))
        return torch.from_numpy(faiss.vector_to_array(quantizer.centroids).copy())

    stacked = torch.stack(_per_head(train_head, heads))
    return Codebook(stacked.view(heads, parts, CENTROIDS, dim // parts), count)


def _rows(keys: torch.Tensor) -> np.ndarray:
    return keys.float().contiguous().numpy()


def _per_head(work: Callable[[int], T], heads: int) -> list[T]:
    """Results of `work(head)`: heads side by side, each in one thread.

    faiss would share out the work of one head, which is too small for that: its threads wait for
    each other most of the time.
    """

    def alone(head: int) -> T:
        faiss.omp_set_num_threads(1)  # of the calling thread only
        return work(head)

    with ThreadPoolExecutor(min(heads, torch.get_num_threads())) as pool:
        return list(pool.map(alone, range(heads)))
