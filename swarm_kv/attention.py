"""The attention and mask functions that transformers calls under the name "swarm_kv"."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from . import compat
from .cache import ATTENTION_NAME
from .dense import windowed_attention
from .errors import ArgumentError


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
    complete, and attention is exact.

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
        ArgumentError: dropout, attention weights or a 4D mask were asked for.
    """
    layer = compat.take_over(key, kwargs)
    reason = None
    if dropout:
        reason = f"swarm_kv is for inference: dropout is {dropout}, call model.eval()"
    elif module.training and torch.is_grad_enabled() and query.requires_grad:
        reason = (
            "swarm_kv is for inference and would lose the gradients: call model.eval(), or run "
            "under torch.no_grad()"
        )
    elif kwargs.get("output_attentions"):
        reason = "swarm_kv never builds the attention matrix: `output_attentions` is not supported"
    elif attention_mask is not None and attention_mask.ndim != 2:
        reason = f"swarm_kv takes a padding mask [batch, length], not {list(attention_mask.shape)}"
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


def swarm_mask(
    *,
    attention_mask: torch.Tensor | None = None,
    kv_length: int,
    kv_offset: int = 0,
    use_vmap: bool = False,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Mask for `AttentionMaskInterface`: bool [batch, kv_length], or None without padding.

    Causality and sliding windows follow from positions, so nothing of size length x length is made.

    Raises:
        ArgumentError: a static cache, or a model that wants another mask than the causal one.
    """
    end = kwargs["q_offset"] + kwargs["q_length"]
    if kv_offset + kv_length != end:
        raise ArgumentError(
            f"swarm_kv does not work with StaticCache (it offers {kv_offset + kv_length} keys, "
            f"{end} exist): leave `cache_implementation` unset, or unpatch the model"
        )
    if use_vmap:
        raise ArgumentError(
            "swarm_kv supports causal attention to text only; this model asked for a mask of its "
            "own (image tokens, packed sequences)"
        )
    if attention_mask is None:
        return None
    visible = attention_mask[:, -kv_length:].to(torch.bool)
    return None if bool(visible.all()) else visible


def register() -> None:
    """Make the name known to transformers. Models that do not ask for it are not affected."""
    AttentionInterface.register(ATTENTION_NAME, swarm_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, swarm_mask)
