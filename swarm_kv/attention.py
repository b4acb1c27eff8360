"""The attention and mask functions that transformers calls under the name "swarm_kv"."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch

from . import compat
from .cache import ATTENTION_NAME
from .dense import windowed_attention
from .errors import ArgumentError
from .once_imported import once_imported
from .untraced import untraced

NO_WEIGHTS = "swarm_kv never builds the attention matrix: `output_attentions` is not supported"
UNKNOWN_TERMS = ("position_bias", "sinks", "indices", "block_indices")
"""What a few models give their attention beside queries and keys, and this one would leave out."""


def swarm_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for `AttentionInterface`.

    With a `SwarmLayer` behind the keys, they are only the new tokens and the layer attends to
    everything before them too. Otherwise (a sliding layer, another cache, no cache) they are
    complete, and attention is exact and differentiable.

    Args:
        module: the attention module.
        query: [batch, heads, n, head_dim], rotated.
        key, value: [batch, kv_heads, m, head_dim].
        attention_mask: what `swarm_mask` returned.
        dropout: must be 0.
        scaling, sliding_window, softcap, s_aux: as the model gives them.
        kwargs: among them the layer, see `compat.hand_over`.

    Returns:
        `(output [batch, n, heads, head_dim], None)`.

    Raises:
        ArgumentError: dropout, attention weights, a 4D mask, or a gradient through a `SwarmLayer`
            were asked for, or the model's attention is of a kind that is not known here.
    """
    layer = compat.take_over(key, kwargs)
    reason = None
    unknown = [name for name in UNKNOWN_TERMS if kwargs.get(name) is not None]
    if dropout:
        reason = (
            f"swarm_kv's attention has no dropout and the model asks for {dropout}: call "
            "model.eval(), or set `attention_dropout` of its config to 0"
        )
    elif layer is not None and module.training and torch.is_grad_enabled() and query.requires_grad:
        reason = (
            "swarm_kv's cache has no gradient: pass `use_cache=False` to train, or run under "
            "torch.no_grad()"
        )
    elif kwargs.get("output_attentions"):
        reason = NO_WEIGHTS
    elif attention_mask is not None and attention_mask.ndim != 2:
        reason = f"swarm_kv takes a padding mask [batch, length], not {list(attention_mask.shape)}"
    elif unknown:
        reason = (
            f"the model gives its attention `{unknown[0]}`, which swarm_kv does not support: "
            "unpatch it"
        )
    elif layer is None and sliding_window is None and _in_window(module):
        reason = (
            "the model has a layer that attends to a window of tokens, and does not tell its "
            "attention which, so swarm_kv does not support it: unpatch it"
        )
    elif layer is not None and sliding_window is not None:
        reason = (
            f"layer {layer.layer_idx} attends to a window of {sliding_window} tokens but its cache "
            "keeps all: make the SwarmCache with this model's own config"
        )
    elif layer is not None and not layer.holds(key, value):
        reason = (
            f"the model changes keys or values after layer {layer.layer_idx}'s cache took them, or "
            "attends to them twice, which swarm_kv does not support: unpatch it"
        )
    if reason is not None:
        if layer is not None:
            layer.unstage()
        raise ArgumentError(reason)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if layer is not None:
        return layer.attend(query, attention_mask, scale, softcap, s_aux), None
    out = windowed_attention(
        query,
        key,
        value,
        mask=attention_mask,
        scale=scale,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        causal=getattr(module, "is_causal", True),
    )
    return out, None


def _in_window(module: torch.nn.Module) -> bool:
    """Whether the configuration says that the layer does not attend to everything."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    number = getattr(module, "layer_idx", None)
    if not kinds or number is None or number >= len(kinds):
        return False
    return kinds[number] in ("sliding_attention", "chunked_attention")


def swarm_mask(
    *,
    attention_mask: torch.Tensor | None = None,
    kv_length: int,
    mask_function: Any,
    kv_offset: int = 0,
    local_size: int | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Mask for `AttentionMaskInterface`: bool [batch, kv_length], or None without padding.

    Causality and sliding windows follow from positions, so nothing of size length x length is made.

    Raises:
        ArgumentError: a static cache, or a model that wants another mask than the causal one.
    """
    end = int(kwargs["q_offset"] + kwargs["q_length"])
    if kv_offset + kv_length != end:
        raise ArgumentError(
            f"swarm_kv does not work with StaticCache (it offers {kv_offset + kv_length} keys, "
            f"{end} exist): leave `cache_implementation` unset, or unpatch the model"
        )
    if use_vmap or not _is_causal(mask_function, local_size):
        raise ArgumentError(
            "swarm_kv supports causal attention to text only; this model asked for a mask of its "
            "own (image tokens, packed sequences)"
        )
    if attention_mask is None:
        return None
    visible = attention_mask[:, -kv_length:].to(torch.bool)
    return None if bool(visible.all()) else visible


@untraced
def _is_causal(mask_function: Any, window: int | None) -> bool:
    """Whether a mask is the causal one (in a sliding window), with nothing laid over it."""
    from transformers import masking_utils

    if window is None:
        return mask_function is masking_utils.causal_mask_function
    return _same(mask_function, masking_utils.sliding_window_causal_mask_function(window))


def _same(one: Any, other: Any) -> bool:
    """Whether two functions are the same code over the same values."""
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        values = ([cell.cell_contents for cell in f.__closure__ or ()] for f in (one, other))
        return one.__code__ == other.__code__ and _same(*map(tuple, values))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)


def register() -> None:
    """Make the name known to transformers. Models that do not ask for it are not affected.

    What is not imported yet, and what only models need, learns it when it is.
    """
    once_imported(
        "transformers.modeling_utils",
        lambda module: module.AttentionInterface.register(ATTENTION_NAME, swarm_attention),
    )
    once_imported(
        "transformers.masking_utils",
        lambda module: module.AttentionMaskInterface.register(ATTENTION_NAME, swarm_mask),
    )
