"""Product-quantised codes of keys: a few bytes per key that still tell which keys a query wants.

Each KV head's keys are cut into sub-vectors, and each sub-vector is replaced by the number of the
nearest of 256 centroids (faiss). `swarm_kv.ops.score_codes` scores queries against the codes.
"""

from __future__ import annotations

import dataclasses

import faiss
import numpy as np
import torch

CENTROIDS = 256
ITERATIONS = 4
TRAINING_KEYS = 8192
ENCODING_ROWS = 4096
SEED = 1234


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
        out = torch.empty(heads, parts, keys.shape[1], dtype=torch.uint8)
        # |x - c|^2 without the constant |x|^2
        norms = self.centroids.square().sum(-1).unsqueeze(2)
        for begin in range(0, keys.shape[1], ENCODING_ROWS):
            rows = keys[:, begin : begin + ENCODING_ROWS].float()
            rows = rows.reshape(heads, -1, parts, size).transpose(1, 2)
            distance = norms - 2 * rows @ self.centroids.transpose(-1, -2)
            out[:, :, begin : begin + ENCODING_ROWS] = distance.argmin(-1).to(torch.uint8)
        return out


def train(keys: torch.Tensor, parts: int) -> Codebook:
    """Fit the centroids of each head and part.

    Args:
        keys: [kv_heads, n, head_dim], any float dtype.
        parts: bytes per code and head; divides head_dim.
    """
    heads, count, dim = keys.shape
    step = -(-count // TRAINING_KEYS)
    sample = keys[:, ::step].float()
    if sample.shape[1] < CENTROIDS:  # faiss wants a point per centroid; repeated ones do no harm
        repeats = -(-CENTROIDS // sample.shape[1])
        sample = sample.repeat(1, repeats, 1)
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)  # these problems are too small to share between threads
    try:
        centroids = [_train_head(sample[head].contiguous().numpy(), parts) for head in range(heads)]
    finally:
        faiss.omp_set_num_threads(threads)
    stacked = torch.from_numpy(np.stack(centroids)).view(heads, parts, CENTROIDS, dim // parts)
    return Codebook(stacked, count)


def _train_head(sample: np.ndarray, parts: int) -> np.ndarray:
    quantizer = faiss.ProductQuantizer(sample.shape[1], parts, 8)
    quantizer.cp.niter = ITERATIONS
    quantizer.cp.min_points_per_centroid = 1
    quantizer.cp.seed = SEED
    quantizer.train(sample)
    return faiss.vector_to_array(quantizer.centroids).copy()
