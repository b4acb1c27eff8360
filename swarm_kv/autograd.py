"""Gradients: `sparse_attention` and `merge_attention` have a backward, the other operators refuse.

The backwards are written in PyTorch's own operations, so they run on any device, compile, and can
be differentiated again. Probabilities are not kept: `exp(score - lse)` gives them back.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import _library  # noqa: F401  (loads the operators)

_ops: Any = torch.ops.swarm_kv
_c: Any = torch._C

WITHOUT_BACKWARD = (
    "activation_signatures",
    "decode_entries",
    "encode_entries",
    "fetch_attend",
    "gather_entries",
    "score_clusters",
    "score_coded_clusters",
    "score_codes",
    "score_packed_codes",
    "segment_write",
    "select_clusters",
    "select_intervals",
    "select_two_level",
    "simulate_cache",
    "simulate_reads",
    "stored_entry_bytes",
    "window_append",
)
"""Operators with floating arguments that gradients do not pass."""


def below() -> Any:
    """A context without autograd: operators skip its kernels, which take microseconds each."""
    return _c._AutoDispatchBelowAutograd()


def _shift_of(lse: Tensor) -> Tensor:
    """What scores are relative to: 0 in place of the minus infinity of what holds no entries."""
    return lse.masked_fill(lse == -math.inf, 0)


# ---- sparse_attention


def _entry_elements(slots: Tensor, size: int) -> Tensor:
    """[total, size]: the elements of the pool that each entry is made of."""
    return slots[:, None] + torch.arange(size, device=slots.device)


def _keep_sparse(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, pool, slots, row_offsets, kv_heads, scale, sinks, softcap = inputs
    ctx.settings = kv_heads, scale, softcap
    ctx.differentiable_pool = ctx.needs_input_grad[1]
    # A pool that takes no gradient is a store's, and will hold other entries in the backward.
    source = pool
    if not ctx.differentiable_pool:
        source = _ops.gather_entries(pool, slots, 2 * kv_heads * q.size(2))
    ctx.save_for_backward(q, source, slots, row_offsets, sinks, *output)


def _sparse_backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    """With p = exp(s - lse): d v_i = p_i d out, d s_i = p_i (d out . (v_i - out) + d lse)."""
    q, source, slots, row_offsets, sinks, out, lse = ctx.saved_tensors
    kv_heads, scale, softcap = ctx.settings
    rows, heads, dim = q.shape
    elements = _entry_elements(slots, 2 * kv_heads * dim)
    entries = source[elements] if ctx.differentiable_pool else source
    keys, values = entries.to(out.dtype).reshape(-1, 2, kv_heads, dim).unbind(1)
    row = torch.repeat_interleave(row_offsets.diff(), output_size=slots.size(0))
    shift = _shift_of(lse)
    offset = (grad_out * out).sum(-1) - grad_lse

    def of_group(tensor: Tensor, member: int) -> Tensor:
        """[total, kv_heads, ...]: per entry, what its row has for one query head of each group."""
        shape = (rows, kv_heads, heads // kv_heads, *tensor.shape[2:])
        return tensor.reshape(shape)[:, :, member][row]

    grad_keys, grad_values, grad_queries = torch.zeros_like(keys), torch.zeros_like(values), []
    for member in range(heads // kv_heads):  # one at a time: memory for one query head per KV head
        query, grad = of_group(q.to(out.dtype), member), of_group(grad_out, member)
        scores = scale * (query * keys).sum(-1)
        slope: Tensor | float = scale
        if softcap is not None:
            bent = torch.tanh(scores / softcap)
            scores, slope = softcap * bent, scale * (1 - bent * bent)
        weights = torch.exp(scores - of_group(shift, member))
        grad_products = slope * weights * ((grad * values).sum(-1) - of_group(offset, member))
        grad_values = grad_values + weights[..., None] * grad
        grad_keys = grad_keys + grad_products[..., None] * query
        nothing = out.new_zeros(rows, kv_heads, dim)
        grad_queries.append(nothing.index_add(0, row, grad_products[..., None] * keys))
    grad_q = torch.stack(grad_queries, 2).reshape(rows, heads, dim).to(q.dtype)
    grad_pool = grad_sinks = None
    if ctx.differentiable_pool:
        grad_entries = torch.stack([grad_keys, grad_values], 1).reshape(-1)
        grad_pool = out.new_zeros(source.shape).index_add(0, elements.reshape(-1), grad_entries)
        grad_pool = grad_pool.to(source.dtype)
    if sinks is not None:
        grad_sinks = -(torch.exp(sinks.to(out.dtype) - shift) * offset).sum(0).to(sinks.dtype)
    return grad_q, grad_pool, None, None, None, None, grad_sinks, None


# ---- merge_attention


def _keep_merge(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _merge_backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor, ...]:
    """With w = exp(lse_a - lse): d out_a = w d out, d lse_a = w (d out . (out_a - out) + d lse)."""
    out_a, lse_a, out_b, lse_b, out, lse = ctx.saved_tensors
    gradients: list[Tensor] = []
    for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = torch.exp(part_lse - _shift_of(lse))
        gradients.append(weight[..., None] * grad_out)
        gradients.append(weight * ((grad_out * (part - out)).sum(-1) + grad_lse))
    return tuple(gradients)


# ---- the others


def _refuse(library: Any, name: str) -> None:
    """Let an operator fail, before it does anything, where a gradient would get lost."""
    op = getattr(_ops, name).default

    def refuse(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and _c._any_requires_grad(*args, **kwargs):
            raise NotImplementedError(
                f"swarm_kv::{name} has no backward and an argument requires grad: run it under "
                "torch.no_grad() or pass detached tensors"
            )
        with below():
            return op.redispatch(keyset & _c._after_autograd_keyset, *args, **kwargs)

    library.impl(name, refuse, "Autograd", with_keyset=True)


torch.library.register_autograd(
    "swarm_kv::sparse_attention", _sparse_backward, setup_context=_keep_sparse
)
torch.library.register_autograd(
    "swarm_kv::merge_attention", _merge_backward, setup_context=_keep_merge
)
_library_of_refusals: Any = torch.library.Library("swarm_kv", "FRAGMENT")  # type: ignore[no-untyped-call]
for _name in WITHOUT_BACKWARD:
    _refuse(_library_of_refusals, _name)
