"""Next-token predictions beside those of full attention: perplexity and KL divergence."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .. import compat
from ..errors import ArgumentError
from .session import CacheFactory, Session

REFERENCE_CHUNK = 256
"""Query tokens per forward pass of the reference; bounds its logits to this many rows."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Next-token predictions of sparse decoding against those of full attention."""

    steps: int
    """Predicted tokens."""
    ppl_full: float
    ppl_sparse: float
    ratio: float
    """ppl_sparse / ppl_full. May fall below 1 by chance: `mean_kl` tells methods apart better."""
    mean_kl: float
    """Mean of KL(full || sparse) over the steps, in nats."""
    top1_agreement: float
    """Share of the steps where both rank the same token first."""


def _sequence(ids: torch.Tensor, context: int, steps: int) -> torch.Tensor:
    ids = ids.reshape(1, -1) if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.shape[0] != 1:
        raise ArgumentError(
            f"`ids` must be one sequence, [T] or [1, T]; got shape {list(ids.shape)}"
        )
    if context < 2 or steps < 1:
        raise ArgumentError(
            f"`context` ({context}) must be at least 2 tokens and `steps` ({steps}) at least 1"
        )
    if ids.shape[1] < context + steps:
        raise ArgumentError(
            f"`ids` has {ids.shape[1]} tokens, but `context` + `steps` is {context + steps}: "
            "give a longer text or fewer steps"
        )
    return ids[:, : context + steps]


def _log_probs(
    model: Any,
    ids: torch.Tensor,
    context: int,
    cache_factory: CacheFactory | None,
    prefill_chunk: int | None,
    stride: int,
) -> Iterator[torch.Tensor]:
    """Yield blocks of at most `stride` rows; row i of all of them predicts `ids[context + i]`."""
    session = Session(model, cache_factory)
    # The last token of the context is decoded, not prefilled: every row comes from decoding.
    session.prefill(ids[:, : context - 1], prefill_chunk)
    for block in session.predict(ids[:, context - 1 : -1], stride):
        yield block[0]


def teacher_forced(
    model: Any,
    ids: torch.Tensor,
    context: int,
    steps: int,
    cache_factory: CacheFactory | None = None,
    *,
    prefill_chunk: int | None = None,
    stride: int = 1,
) -> torch.Tensor:
    """Log-probabilities of the `steps` tokens that follow a context, given the true tokens before.

    The first `context - 1` tokens are prefilled, all others decoded `stride` tokens at a time.

    Args:
        model: a causal language model of transformers, patched or not.
        ids (`torch.Tensor`): one sequence, int64 `[T]` or `[1, T]`, T at least `context + steps`.
        context (`int`): tokens before the first predicted one.
        steps (`int`): tokens to predict.
        cache_factory (`Callable`, *optional*): makes the cache; the model makes one if not given.
        prefill_chunk (`int`, *optional*): tokens per prefill call; the whole context if not given.
        stride (`int`, *optional*, defaults to 1): query tokens per decoding call. Only 1 exercises
            sparse decoding; more is faster where attention is full anyway.

    Returns:
        `[steps, vocabulary]` on the CPU, float32, or float64 from a float64 model; row i is the
        distribution of token `context + i`. Takes 4 bytes x steps x vocabulary: `perplexity_kl`
        compares without keeping it.
    """
    ids = _sequence(ids, context, steps)
    return torch.cat(list(_log_probs(model, ids, context, cache_factory, prefill_chunk, stride)))


def check_unpatched(model: Any) -> None:
    """Refuse a model that attends through swarm_kv, which cannot be its own reference.

    Raises:
        ArgumentError: it does.
    """
    if compat.attention_name(model) == compat.HANDLE:
        raise ArgumentError(
            "this model attends through swarm_kv, so it cannot give the full-attention reference: "
            "call this before swarm_kv.patch(), or after it was undone"
        )


def full_attention(model: Any, ids: torch.Tensor, context: int, steps: int) -> torch.Tensor:
    """What `teacher_forced` gives under full attention, in few forward passes.

    Raises:
        ArgumentError: the model attends through swarm_kv, so that it cannot be its own reference.
    """
    check_unpatched(model)
    return teacher_forced(
        model, ids, context, steps, prefill_chunk=2 * REFERENCE_CHUNK, stride=REFERENCE_CHUNK
    )


def perplexity(log_probs: torch.Tensor, targets: torch.Tensor) -> float:
    """Perplexity of `targets` `[steps]` under log-probabilities `[steps, vocabulary]`."""
    picked = log_probs.gather(1, targets.to(log_probs.device)[:, None])
    return math.exp(-picked.double().mean().item())


def kl_divergence(full: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
    """KL(full || sparse) in nats of each row of two log-probability tensors; float64 `[steps]`."""
    full, sparse = full.double(), sparse.double()
    return (full.exp() * (full - sparse)).sum(-1)


def compare_predictions(
    reference: torch.Tensor,
    blocks: Iterable[torch.Tensor],
    targets: torch.Tensor,
    on_step: Callable[[int], object] | None = None,
) -> Comparison:
    """Compare predictions, as they come, with those of full attention.

    Args:
        reference (`torch.Tensor`): log-probabilities `[steps, vocabulary]` under full attention.
        blocks (`Iterable[torch.Tensor]`): the others, `[some, vocabulary]`, `steps` rows in all.
        targets (`torch.Tensor`): the true tokens, int64 `[steps]`.
        on_step (`Callable`, *optional*): called with the number of new steps, for progress bars.
    """
    steps = len(reference)
    chosen, kl, same = 0.0, 0.0, 0
    for i, sparse in enumerate(itertools.chain.from_iterable(blocks)):
        full = reference[i]
        chosen += sparse[targets[i]].item()
        kl += kl_divergence(full, sparse).item()
        same += int(full.argmax() == sparse.argmax())
        if on_step is not None:
            on_step(1)
    ppl_full = perplexity(reference, targets)
    ppl_sparse = math.exp(-chosen / steps)
    return Comparison(
        steps=steps,
        ppl_full=ppl_full,
        ppl_sparse=ppl_sparse,
        ratio=ppl_sparse / ppl_full,
        mean_kl=kl / steps,
        top1_agreement=same / steps,
    )


def perplexity_kl(
    model: Any,
    ids: torch.Tensor,
    context: int,
    steps: int,
    cache_factory: CacheFactory | None = None,
    *,
    reference: torch.Tensor | None = None,
    prefill_chunk: int | None = None,
    on_step: Callable[[int], object] | None = None,
) -> Comparison:
    """Decode `steps` tokens after a context, teacher-forced, and compare with full attention.

    Args:
        model: as for `teacher_forced`, like the next four.
        ids (`torch.Tensor`): one sequence, `[T]` or `[1, T]`.
        context (`int`): tokens before the first predicted one.
        steps (`int`): tokens to predict.
        cache_factory (`Callable`, *optional*): makes the cache; the model makes one if not given.
        prefill_chunk (`int`, *optional*): tokens per prefill call; the whole context if not given.
        reference (`torch.Tensor`, *optional*): result of `full_attention` with the same arguments.
            Computed here if not given, which needs a model that is not patched.
        on_step (`Callable`, *optional*): called with the number of new steps, for progress bars.
    """
    ids = _sequence(ids, context, steps)
    if reference is None:
        reference = full_attention(model, ids, context, steps)
    elif reference.ndim != 2 or reference.shape[0] != steps:
        raise ArgumentError(
            f"`reference` has shape {list(reference.shape)}, but {steps} steps are compared: "
            "make it by full_attention() with the same `context` and `steps`"
        )
    blocks = _log_probs(model, ids, context, cache_factory, prefill_chunk, stride=1)
    return compare_predictions(reference, blocks, ids[0, context:].cpu(), on_step)
