"""How stored entries are grouped into clusters, by name.

A clusterer is a function `(bits, keys, config) -> (offsets, members)`: signatures int64 [N, words]
(see `swarm_kv.ops.activation_signatures`) and keys [Hkv, N, D] of the entries; clusters as
`swarm_kv.ops.cluster` gives them, int32, each entry at least once among the members. A new one is a
function with `@clusterer("name")`; a `SwarmConfig` may also be given the function itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import faiss
import numpy as np
import torch

from . import ops
from .config import WITH_RADIUS, SwarmConfig
from .registry import Registry

Clusters = tuple[torch.Tensor, torch.Tensor]
Clusterer = Callable[[torch.Tensor, torch.Tensor, SwarmConfig], Clusters]

KEYS_PER_CELL = 16
ITERATIONS = 20
SEED = 1234

_CLUSTERERS: Registry[Clusterer] = Registry("clusterer")
clusterer = _CLUSTERERS.register
"""Registers a clusterer under a name."""
names = _CLUSTERERS.names
"""Names that `SwarmConfig.clusterer` may be."""
resolve = _CLUSTERERS.resolve
"""The clusterer that a setting names or is."""


def has_radius(choice: Any) -> bool:
    """Whether `config.tau` makes a difference to a clusterer."""
    return callable(choice) or choice in WITH_RADIUS


def _by_operator(
    name: str, bits: torch.Tensor, keys: torch.Tensor, config: SwarmConfig
) -> Clusters:
    return ops.cluster(
        bits,
        name,
        config.distance,
        float(config.tau),
        config.cluster_size,
        config.max_replicas,
        config.min_activation,
        "coded" if config.cold == "auto" else config.cold,
        config.block,
        config.max_index_bytes,
    )


for _name in ("swarm", "no_replica", "medoid_only", "hypergraph", "sequence_blocks"):
    clusterer(_name)(functools.partial(_by_operator, _name))


@clusterer("kmeans_keys")
def kmeans_keys(bits: torch.Tensor, keys: torch.Tensor, config: SwarmConfig) -> Clusters:
    """k-means of the keys, all KV heads together: similar keys, whether or not wanted together.

    A centroid for every 16 keys, and an entry in the nearest cell alone. Members come in ascending
    distance to the centroid; cells of more than `max_size` are cut in this order.

    Args:
        bits: not looked at.
        keys: [Hkv, N, D] floating.
        config: `max_size`.
    """
    entries = keys.shape[1]
    if entries == 0:
        return torch.zeros(1, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    rows = keys.transpose(0, 1).flatten(1).float().contiguous().numpy()
    cells = -(-entries // KEYS_PER_CELL)
    kmeans = faiss.Clustering(rows.shape[1], cells)
    kmeans.niter = ITERATIONS
    kmeans.seed = SEED
    kmeans.min_points_per_centroid = 1
    index = faiss.IndexFlatL2(rows.shape[1])
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(torch.get_num_threads())  # of the calling thread only
    try:
        kmeans.train(rows, index)
        distances, nearest = index.search(rows, 1)
    finally:
        faiss.omp_set_num_threads(threads)
    order = np.lexsort((distances[:, 0], nearest[:, 0]))
    ends = np.bincount(nearest[:, 0], minlength=cells).cumsum()
    cuts = [
        np.append(np.arange(begin, end, config.cluster_size)[1:], end)
        for begin, end in zip([0, *ends[:-1]], ends, strict=True)
        if end > begin
    ]
    offsets = np.concatenate([[0], *cuts])
    return torch.from_numpy(offsets).int(), torch.from_numpy(order).int()
