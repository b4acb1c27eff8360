"""What differs between the transformers versions that are supported (5.5 and newer), in one place.

Nothing else in the package asks for a transformers version or spells a name that changed.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

from .errors import ArgumentError
from .untraced import untraced

OLDEST = "5.5"
"""The oldest transformers that is supported."""
HANDLE = "swarm_kv"
"""Name under which a cache layer travels from `update()` to the attention function."""


def check_version(found: str) -> None:
    """Refuse a transformers that is too old, before anything of it is used.

    Raises:
        ImportError: names the version and the way to a newer one.
    """

    def numbers(version: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", version)[:2]]

    if numbers(found) < numbers(OLDEST):
        raise ImportError(
            f"swarm_kv needs transformers {OLDEST} or newer, this is {found}: "
            f'pip install "transformers>={OLDEST},<6"'
        )


check_version(transformers.__version__)


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
    interfaces = transformers.AttentionInterface, transformers.AttentionMaskInterface
    for interface, function in zip(interfaces, (attention, mask), strict=True):
        interface.register(name, function)
    try:
        yield
    finally:  # there is no public way to take a name back
        for interface in interfaces:
            interface._global_mapping.pop(name, None)


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
        layer = _taken_off(key_states)
    return layer


@untraced  # compilers do not see what is written onto a tensor
def _taken_off(key_states: torch.Tensor) -> Any | None:
    return key_states.__dict__.pop("_swarm_kv_layer", None)


def crop_takes_removals() -> bool:
    """Whether `crop` of transformers' own layers takes minus the number of tokens to remove.

    So it is since 5.17; only then do sliding layers know how to go back.
    """
    from transformers.cache_utils import DynamicLayer

    return hasattr(DynamicLayer, "is_croppable")


def cropped_length(length: int, n: int) -> int:
    """Tokens left after `crop(n)` on a cache of `length` tokens.

    Since 5.17 n <= 0 is minus the number of tokens to remove; before, n >= 0 was the final length.
    The ranges overlap in 0 alone, which means what it does in the transformers that is installed.

    Raises:
        ArgumentError: more tokens are to be removed than there are. transformers' own cache is
            empty then or, before 5.17, has lost some number of tokens.
    """
    if -n > length:
        raise ArgumentError(
            f"crop({n}) would remove {-n} tokens, but the cache has {length}: remove at most "
            f"{length}, or empty it with reset()"
        )
    if n == 0 and not crop_takes_removals():
        return 0
    return length + n if n <= 0 else min(n, length)


def keep_past(cache: Any) -> None:
    """Let sliding layers keep what `crop` may need, where they can: since 5.17."""
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()


def crop_refusal(layer: Any, count: int) -> str | None:
    """Why one of transformers' own cache layers cannot go back `count` tokens; None if it can.

    Asked to, some raise when other layers have gone back already, and some keep a wrong state.
    """
    if hasattr(layer, "recurrent_states"):
        if getattr(layer, "record_past", False) and layer.is_croppable:
            return None  # convolutions alone
        return "keeps a recurrent state, which cannot go back"
    if getattr(layer, "is_sliding", False) and layer.keys is not None:
        kept, window = layer.keys.shape[-2], layer.sliding_window
        if kept - count < min(window - 1, layer.get_seq_length() - count):
            way = (
                "; it keeps more from cache.activate_past_recording() on"
                if hasattr(layer, "activate_past_recording")
                else "; transformers 5.17 and newer can keep more"
            )
            return f"keeps the last {kept} tokens of its sliding window of {window} only{way}"
    return None
