"""A model at work on one sequence, which may be forked where it stands."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import compat

CacheFactory = Callable[[], Any]
"""Makes an empty cache for one sequence. None stands for the cache that the model makes itself."""


class Session:
    """What is fed to a model, and its cache.

    Args:
        model: a causal language model of transformers, patched or not.
        cache_factory: makes the cache; the model makes one if not given.
    """

    def __init__(self, model: Any, cache_factory: CacheFactory | None = None) -> None:
        self._model = model
        self._name = compat.cache_arg(model)
        self._cache: Any = None if cache_factory is None else cache_factory()
        self._last_only = compat.last_logits_only(model)

    @torch.no_grad()
    def feed(self, ids: torch.Tensor, *, last_only: bool = False) -> torch.Tensor:
        """Logits `[rows, tokens, vocabulary]` after `ids` `[rows, tokens]`, or after the last."""
        given = {} if self._cache is None else {self._name: self._cache}
        options = self._last_only if last_only else {}
        out = self._model(ids.to(self._model.device), use_cache=True, **given, **options)
        self._cache = compat.cache_of(out)
        logits: torch.Tensor = out.logits
        return logits[:, -1:] if last_only else logits

    def prefill(self, ids: torch.Tensor, chunk: int | None = None) -> None:
        """Feed `ids` in calls of at most `chunk` tokens; all at once if not given."""
        for part in torch.split(ids, chunk or ids.shape[1], dim=1):
            self.feed(part, last_only=True)

    def predict(self, ids: torch.Tensor, stride: int = 1) -> Iterator[torch.Tensor]:
        """Feed `ids` `[rows, tokens]`, `stride` tokens at a time.

        Yields:
            Log-probabilities `[rows, at most stride, vocabulary]` of what follows each token, on
            the CPU, float32, or float64 from a float64 model.
        """
        for part in torch.split(ids, stride, dim=1):
            logits = self.feed(part)
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            yield wide.log_softmax(-1).cpu()

    def fork(self, rows: int = 1) -> Session:
        """A session that goes on from here on its own, in `rows` equal rows."""
        other = copy.copy(self)
        other._cache = copy.deepcopy(self._cache)
        if rows > 1:
            other._cache.batch_repeat_interleave(rows)
        return other
