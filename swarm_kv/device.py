"""What runs on the device of a model's queries, rather than on the host: attention, and scores."""

from __future__ import annotations

from collections.abc import Collection, MutableMapping

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from . import _library
from .codes import Codebook

KINDS: Collection[str] = ("cuda",)
"""Kinds of devices that attend. Tests add "cpu", where the device's memory is the host's."""

HEAD_DIMS = (64, 128, 256)
"""Features per head that CUDA kernels know."""

INDEX_SHARE = 4
"""One of so many bytes of `hbm_bytes` is for codes. They take about a thirtieth of the bytes of
their entries, of which a cache of any use holds a tenth: so all codes fit beside it."""


def attends(query: torch.Tensor) -> bool:
    """Whether queries [..., head_dim] can be answered on their device.

    They can on a GPU, unless swarm_kv was built without CUDA, a head has another size than kernels
    know, or numbers are float64.
    """
    if query.device.type not in KINDS:
        return False
    if query.device.type != "cuda":
        return True
    known = query.shape[-1] in HEAD_DIMS and query.dtype != torch.float64
    return known and _library.cuda_status().loaded


class Scorer:
    """Scores codes on a device, of which it holds copies for as long as the originals are there.

    Args:
        place: the device.
        limit: bytes of all copies. Codes that find no room are scored on the host.
    """

    def __init__(self, place: torch.device, limit: int) -> None:
        self._place = place
        self._limit = limit
        self._copies: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()

    @property
    def used(self) -> int:
        """Bytes of all copies."""
        return sum(copy.nbytes for copy in self._copies.values())

    def score(self, codebook: Codebook, query: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """What `Codebook.score` returns, of and to the host."""
        originals = codebook.centroids, codebook.turn, codes
        if not self._hold(originals):
            return codebook.score(query, codes)
        centroids, turn, copied = (self._copies[one] for one in originals)
        there = Codebook(centroids, turn, codebook.trained_on)
        return self._to_host(there.score(query.to(self._place), copied))

    def _hold(self, originals: tuple[torch.Tensor, ...]) -> bool:
        missing = [one for one in originals if one not in self._copies]
        if missing and self.used + sum(one.nbytes for one in missing) > self._limit:
            return False
        for one in missing:
            self._copies[one] = one.to(self._place, copy=True)
        return True

    def _to_host(self, scores: torch.Tensor) -> torch.Tensor:
        if not scores.is_cuda:
            return scores
        host = torch.empty(scores.shape, dtype=scores.dtype, pin_memory=True)
        host.copy_(scores, non_blocking=True)
        torch.cuda.current_stream(scores.device).record_event().synchronize()
        return host
