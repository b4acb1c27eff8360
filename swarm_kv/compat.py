"""What differs between the transformers versions that are supported (5.5 and newer), in one place.

Nothing else in the package asks for a transformers version or spells a name that changed.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

HANDLE = "swarm_kv"
"""Name under which a cache layer travels from `update()` to the attention function."""


def cache_arg(model: Any) -> str:
    """Keyword of `model.forward` for the cache: `cache` since 5.24, `past_key_values` before."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def cache_position(model: Any) -> int:
    """Place of the cache among the positional arguments of `model.forward`."""
    return list(inspect.signature(model.forward).parameters).index(cache_arg(model))


def cache_keyword(kwargs: dict[str, Any]) -> Any:
    """The cache among keyword arguments, by either name; None if there is none."""
    for name in ("cache", "past_key_values"):  # the old name still works in 5.24
        if kwargs.get(name) is not None:
            return kwargs[name]
    return None


def given_cache(position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The cache among the arguments of a call, by `cache_position` or by either keyword."""
    cache = cache_keyword(kwargs)
    if cache is None and position < len(args):
        cache = args[position]
    return cache


def cache_of(output: Any) -> Any:
    """The cache that a forward pass returned, whatever the field is called."""
    cache = getattr(output, "cache", None)
    return getattr(output, "past_key_values", None) if cache is None else cache


def last_logits_only(model: Any) -> dict[str, int]:
    """Keyword arguments that make `model.forward` compute the logits of the last position only.

    Empty where a model does not offer it: the caller then gets all logits and must index the last.
    """
    names = inspect.signature(model.forward).parameters
    return {"logits_to_keep": 1} if "logits_to_keep" in names else {}


def attention_name(model: Any) -> str | None:
    """Attention implementation that the model's text decoder uses now."""
    return model.config.get_text_config(decoder=True)._attn_implementation


@contextlib.contextmanager
def registered(
    name: str, attention: Callable[..., Any], mask: Callable[..., Any]
) -> Iterator[None]:
    """Make an attention implementation known under `name` until the context ends."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    try:
        yield
    finally:  # there is no public way to take a name back
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def hand_over(layer: Any, key_states: torch.Tensor, kwargs: dict[str, Any] | None) -> None:
    """Give `layer` to the attention call that follows `layer.update(key_states, ...)`.

    Since 5.24 `kwargs` is the dict that the attention module splats into that call. Before, only
    the returned key tensor reaches it, so the layer rides on the tensor object.
    """
    if kwargs is None:
        key_states._swarm_kv_layer = layer  # type: ignore[attr-defined]
    else:
        kwargs[HANDLE] = layer


def take_over(key_states: torch.Tensor, kwargs: dict[str, Any]) -> Any | None:
    """Take back the layer given by `hand_over`; None when the keys come from another cache."""
    layer = kwargs.pop(HANDLE, None)
    if layer is None:
        layer = key_states.__dict__.pop("_swarm_kv_layer", None)
    return layer


def cropped_length(length: int, n: int) -> int:
    """Tokens left after `crop(n)` on a cache of `length` tokens.

    Since 5.17 n <= 0 is minus the number of tokens to remove; before, n > 0 was the final length.
    The two ranges do not overlap, so both meanings are accepted.
    """
    return max(length + n, 0) if n <= 0 else min(n, length)
