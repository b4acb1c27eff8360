"""Exact attention over keys that are at hand, with the log-sum-exp that merging parts needs."""

from __future__ import annotations

from typing import Any

import torch

QUERY_BLOCK = 256
# The CPU kernel behind scaled_dot_product_attention; unlike that, it returns the log-sum-exp.
_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that partial results are kept in: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries [heads, n, dim] to keys and values [kv_heads, m, dim].

    Args:
        q, k, v: one dtype; heads is a multiple of kv_heads.
        scale: factor of the scores.
        causal: query i sees keys up to i (then n equals m).
        softcap: scores become softcap * tanh(score / softcap).

    Returns:
        out [heads, n, dim] and lse [heads, n] in the accumulation dtype; without keys zeros and
        minus infinity.
    """
    groups = q.shape[0] // k.shape[0]
    accumulate = accumulation_dtype(q.dtype)
    if k.shape[1] == 0:  # the kernel would divide by zero, which ends the process
        out = q.new_zeros(*q.shape[:2], v.shape[-1], dtype=accumulate)
        return out, q.new_full(q.shape[:2], float("-inf"), dtype=accumulate)
    if q.device.type == "cpu" and softcap is None and v.shape[-1] == q.shape[-1]:
        k = k.repeat_interleave(groups, dim=0) if groups > 1 else k
        v = v.repeat_interleave(groups, dim=0) if groups > 1 else v
        out, lse = _flash(q[None], k[None], v[None], 0.0, causal, scale=scale)
        return out[0].to(accumulate), lse[0].to(accumulate)
    return _blocked_attention(q, k, v, scale=scale, causal=causal, softcap=softcap)


def _blocked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, count, _ = q.shape
    kv_heads = k.shape[0]
    accumulate = accumulation_dtype(q.dtype)
    out = q.new_empty(heads, count, v.shape[-1], dtype=accumulate)
    lse = q.new_empty(heads, count, dtype=accumulate)
    for begin in range(0, count, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, count)
        seen = end if causal else k.shape[1]
        rows = q[:, begin:end].reshape(kv_heads, -1, q.shape[-1]).to(accumulate)
        scores = rows @ k[:, :seen].to(accumulate).transpose(-1, -2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.view(heads, end - begin, seen)
        if causal:
            position = torch.arange(seen, device=q.device)
            later = position[None, :] > position[begin:end, None]
            scores = scores.masked_fill(later, float("-inf"))
        lse[:, begin:end] = scores.logsumexp(-1)
        weights = scores.softmax(-1).view(kv_heads, -1, seen)
        part = weights @ v[:, :seen].to(accumulate)
        out[:, begin:end] = part.view(heads, end - begin, -1)
    return out, lse


def add_sink_logits(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let one further logit per head, without a value, take its part of the softmax (gpt-oss).

    Args:
        out: [heads, n, dim]. lse: [heads, n]. sinks: [heads].
    """
    logits = sinks.to(lse)[:, None]
    total = torch.logaddexp(lse, logits)
    return out * torch.exp(lse - total)[..., None], total


def windowed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    causal: bool,
) -> torch.Tensor:
    """Attention of the last n of m tokens, block by block, optionally in a sliding window.

    Differentiable in q, k, v and sinks.

    Args:
        q: [batch, heads, n, dim].
        k, v: [batch, kv_heads, m, dim]; the queries belong to the last n of these tokens.
        mask: bool [batch, m], False for padding, or None.
        scale: factor of the scores.
        window: query at position p sees keys after p - window, or None for all.
        softcap, sinks: see `dense_attention` and `add_sink_logits`.
        causal: hide later keys.

    Returns:
        [batch, n, heads, dim] in the query's dtype; zeros where everything is hidden.
    """
    batch, heads, count, _ = q.shape
    kv_heads, total = k.shape[1], k.shape[2]
    if mask is None and window is None and softcap is None and sinks is None and count == total:
        # Torch's own kernel, whose backward does not keep the scores.
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=heads != kv_heads
        )
        return out.transpose(1, 2)
    accumulate = accumulation_dtype(q.dtype)
    position = torch.arange(total, device=q.device)
    parts = []
    for begin in range(0, count, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, count)
        first, last = total - count + begin, total - count + end
        low = 0 if window is None else max(0, first - window + 1)
        high = last if causal else total
        own, seen = position[first:last], position[low:high]
        hidden = torch.zeros(end - begin, high - low, dtype=torch.bool, device=q.device)
        if causal:
            hidden |= seen[None, :] > own[:, None]
        if window is not None:
            hidden |= seen[None, :] <= own[:, None] - window
        hidden = hidden[None, None]
        if mask is not None:
            hidden = hidden | ~mask[:, None, None, low:high]
        blind = hidden.all(
            -1, keepdim=True
        )  # padding: its scores stay finite, or gradients are NaN
        rows = q[:, :, begin:end].reshape(batch, kv_heads, -1, q.shape[-1]).to(accumulate)
        scores = rows @ k[:, :, low:high].to(accumulate).transpose(-1, -2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.view(batch, heads, end - begin, high - low)
        scores = scores.masked_fill(hidden & ~blind, float("-inf"))
        lse = scores.logsumexp(-1, keepdim=True)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.to(lse).view(1, heads, 1, 1))
        weights = torch.exp(scores - lse)
        part = weights.view(batch, kv_heads, -1, high - low) @ v[:, :, low:high].to(accumulate)
        part = part.view(batch, heads, end - begin, -1).masked_fill(blind, 0)
        parts.append(part.transpose(1, 2).to(q.dtype))
    return torch.cat(parts, 1)
