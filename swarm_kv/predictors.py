"""What a layer's query will be, told before the layer is reached, by name.

While layer L - 1 computes, the residual stream is already close to what layer L will see, so L's
own norm, projection and rotation of it give nearly L's query. A prediction decides when entries
are read, see `swarm_kv.prefetch`, and never which are attended.

A predictor is a function `(hint) -> query` of a `Hint`. A new one is a function with
`@predictor("name")`; a `SwarmConfig` may also be given the function itself.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch

from .registry import Registry


@dataclasses.dataclass(frozen=True)
class Hint:
    """What is known when a layer's query is predicted.

    Attributes:
        layer: position of the layer that the query is wanted of.
        hidden: [batch, n, features], the residual stream at the hook point; of layer 0 its input.
        previous: [batch, heads, 1, head_dim], the layer's query at the token before, rotated.
        project: turns a residual stream into the layer's query, as the layer itself does.
    """

    layer: int
    hidden: torch.Tensor
    previous: torch.Tensor | None
    project: Callable[[torch.Tensor], torch.Tensor]


Predictor = Callable[[Hint], torch.Tensor]
"""Returns a query [batch, heads, n, head_dim], rotated and not scaled."""

_PREDICTORS: Registry[Predictor] = Registry("predictor")
predictor = _PREDICTORS.register
"""Registers a predictor under a name."""
names = _PREDICTORS.names
"""Names that `SwarmConfig.predictor` may be."""
resolve = _PREDICTORS.resolve
"""The predictor that a setting names or is."""


@predictor("projection")
def projection(hint: Hint) -> torch.Tensor:
    """The layer's own projection of the residual stream; in layer 1, the query of the token before.

    Layer 0 is predicted from its own input: late, but exactly. It changes the residual stream so
    much that a query of layer 1 is nearer to that of the token before: on SmolLM2, 0.81 of what
    layer 1 wants are predicted so, against 0.74.
    """
    if hint.layer == 1:
        return previous(hint)
    return hint.project(hint.hidden)


@predictor("previous")
def previous(hint: Hint) -> torch.Tensor:
    """The query of the token before."""
    return hint.project(hint.hidden) if hint.previous is None else hint.previous


class Offloaded(Exception):
    """A layer's weights are not in memory: accelerate moves them in for its own calls only."""


class Projection:
    """What turns a residual stream into the query of one decoder layer.

    Args:
        layer: the decoder layer.

    Raises:
        AttributeError: it is built in another way: without an input norm, a query projection of
            its own, or rotary embedding by its module's `apply_rotary_pos_emb`.
    """

    def __init__(self, layer: Any) -> None:
        attention = layer.self_attn
        self._norm, self._project = layer.input_layernorm, attention.q_proj
        # Of each head, not how many there are: with tensor parallelism a rank has its own ones.
        self._width = self._project.out_features // attention.config.num_attention_heads
        self._head_dim = attention.head_dim
        self._query_norm: Any = getattr(attention, "q_norm", None)
        self._rotate = None
        if getattr(attention, "use_rope", True):  # some layers have no positions
            self._rotate = inspect.getmodule(type(attention)).apply_rotary_pos_emb  # type: ignore

    def __call__(self, hidden: torch.Tensor, rope: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Query [batch, heads, n, head_dim] of `hidden` [batch, n, features].

        Raises:
            Offloaded: weights are not in memory.
        """
        norm = self._query_norm
        modules = (self._norm, self._project) if norm is None else (self._norm, self._project, norm)
        weights = [weight for module in modules for weight in module.parameters()]
        if any(weight.is_meta for weight in weights):
            raise Offloaded
        # By `forward`, so that hooks see true activations only; DTensors need torch's own hooks.
        sharded = any(hasattr(weight, "to_local") for weight in weights)

        def call(module: Any, tensor: torch.Tensor) -> Any:
            return module(tensor) if sharded else module.forward(tensor)

        hidden = hidden.to(next(self._project.parameters(), hidden).device)
        query = call(self._project, call(self._norm, hidden))
        norm_of_head = norm is not None and norm.weight.numel() == self._head_dim
        if norm is not None and not norm_of_head:
            query = call(norm, query)
        # Behind a head's query there may be its output gate.
        query = query.view(*hidden.shape[:-1], -1, self._width)[..., : self._head_dim]
        if norm is not None and norm_of_head:
            query = call(norm, query)
        query = query.transpose(1, 2)
        if self._rotate is None:
            return query
        cos, sin = (part.to(query.device) for part in rope)
        rotated: torch.Tensor = self._rotate(query, query[:, :1], cos, sin)[0]
        return rotated
