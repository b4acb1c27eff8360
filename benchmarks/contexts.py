"""A context that a model has computed once, for all caches that are compared on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache

import swarm_kv
from swarm_kv import eval as evaluation
from swarm_kv import trace
from swarm_kv.dense import dense_attention
from swarm_kv.patch import Swarm


@dataclasses.dataclass(frozen=True)
class Context:
    """What the layers of a model computed, all of which have full attention.

    Attributes:
        ids: int64 [1, tokens], the text; it goes on behind the context.
        tokens: of the context.
        layers: by number q [1, heads, tokens, dim], k and v [1, kv_heads, tokens, dim], scale, and
            `log_sums` [1, heads, tokens].
    """

    ids: torch.Tensor
    tokens: int
    layers: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, torch.Tensor]]

    def cache(self, swarm: Swarm | None = None) -> Any:
        """A new cache with the context in it: transformers' own, or one in the store of `swarm`."""
        cache: Any = DynamicCache() if swarm is None else swarm.new_cache()
        for number, layer in self.layers.items():
            if swarm is None:
                cache.update(layer[1], layer[2], number)
            else:
                cache.layers[number].ingest(*layer)
        return cache

    def predictions(
        self, model: Any, swarm: Swarm | None = None, *, stride: int = 1
    ) -> Iterator[torch.Tensor]:
        """Log-probabilities [at most `stride`, vocabulary] of what follows the context and one
        token, the true tokens being fed, `stride` at a time; `swarm` as in `cache`."""
        session = evaluation.Session(model, lambda: self.cache(swarm))
        for block in session.predict(self.ids[:, self.tokens : -1], stride):
            yield block[0]

    def reference(self, model: Any) -> torch.Tensor:
        """`predictions` by full attention, [steps, vocabulary]."""
        return torch.cat(list(self.predictions(model, stride=evaluation.REFERENCE_CHUNK)))


@torch.no_grad()
def computed(model: Any, ids: torch.Tensor, tokens: int) -> Context:
    """Let `model`, which is not patched, compute the first `tokens` of `ids` [1, more tokens]."""
    layers = {}

    def take(number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
        lse = log_sums(q, k, v, scale, swarm_kv.SwarmConfig.profile_queries)
        layers[number] = q[None], k[None], v[None], scale, lse[None]

    with trace.capturing(model, take):
        model.get_decoder()(ids[:, :tokens], use_cache=False)
    return Context(ids, tokens, layers)


def log_sums(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, count: int
) -> torch.Tensor:
    """What attention knows after a prefill, and profiling uses: each query's log-sum-exp.

    Args:
        q: [heads, tokens, dim]. k, v: [kv_heads, tokens, dim].
        scale: of the scores.
        count: last queries that it is worked out for.

    Returns:
        float32 [heads, tokens], 0 for the queries before them.
    """
    first = max(0, q.shape[1] - count)
    how: dict[str, Any] = {"scale": scale, "softcap": None}
    _, before = dense_attention(q[:, first:], k[:, :first], v[:, :first], causal=False, **how)
    _, own = dense_attention(q[:, first:], k[:, first:], v[:, first:], causal=True, **how)
    return torch.nn.functional.pad(torch.logaddexp(before, own), (first, 0))
