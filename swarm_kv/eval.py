"""How close sparse decoding stays to full attention: perplexity, KL divergence, pass keys.

Everything is measured through decoding steps of one token, because those are what reads sparsely: a
prefill, or any call with several query tokens, attends exactly. Typical use:

    reference = full_attention(model, ids, context=6144, steps=1024)
    with swarm_kv.patch(model, config):
        result = perplexity_kl(model, ids, context=6144, steps=1024, reference=reference)
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import compat, texts
from .errors import ArgumentError

CacheFactory = Callable[[], Any]
"""Makes an empty cache for one sequence. None stands for the cache that the model makes itself."""

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


@dataclasses.dataclass(frozen=True)
class PasskeyCase:
    """One hidden key and what the model said."""

    depth: float
    """Where the key stands, as a share of the context."""
    key: str
    answer: str
    found: bool


@dataclasses.dataclass(frozen=True)
class Passkey:
    """Result of `passkey`."""

    cases: tuple[PasskeyCase, ...]

    @property
    def found(self) -> int:
        """Number of keys that the model gave back."""
        return sum(case.found for case in self.cases)

    @property
    def total(self) -> int:
        """Number of keys hidden."""
        return len(self.cases)


class _Session:
    """One sequence being fed to a model, with its cache."""

    def __init__(self, model: Any, cache_factory: CacheFactory | None) -> None:
        self._model = model
        self._name = compat.cache_arg(model)
        self._cache = None if cache_factory is None else cache_factory()
        self._last_only = compat.last_logits_only(model)

    def feed(self, ids: torch.Tensor, *, last_only: bool = False) -> torch.Tensor:
        """Logits `[tokens, vocabulary]` of `ids` `[1, tokens]`, or those of the last token."""
        given = {} if self._cache is None else {self._name: self._cache}
        options = self._last_only if last_only else {}
        out = self._model(ids, use_cache=True, **given, **options)
        self._cache = compat.cache_of(out)
        logits: torch.Tensor = out.logits[0]
        return logits[-1:] if last_only else logits

    def prefill(self, ids: torch.Tensor, chunk: int | None) -> torch.Tensor:
        """Feed `ids` in calls of at most `chunk` tokens; logits `[1, vocabulary]` of the last."""
        logits = ids.new_empty(0)
        for part in torch.split(ids, chunk or ids.shape[1], dim=1):
            logits = self.feed(part, last_only=True)
        return logits


def _sequence(model: Any, ids: torch.Tensor, context: int, steps: int) -> torch.Tensor:
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
    return ids[:, : context + steps].to(model.device)


@torch.no_grad()
def _log_probs(
    model: Any,
    ids: torch.Tensor,
    context: int,
    steps: int,
    cache_factory: CacheFactory | None,
    prefill_chunk: int | None,
    stride: int,
) -> Iterator[torch.Tensor]:
    """Yield blocks of at most `stride` rows; row i of all of them predicts `ids[context + i]`."""
    session = _Session(model, cache_factory)
    # The last token of the context is decoded, not prefilled: every row comes from decoding.
    session.prefill(ids[:, : context - 1], prefill_chunk)
    for part in torch.split(ids[:, context - 1 : context + steps - 1], stride, dim=1):
        logits = session.feed(part)
        yield logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


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
    ids = _sequence(model, ids, context, steps)
    blocks = _log_probs(model, ids, context, steps, cache_factory, prefill_chunk, stride)
    return torch.cat([block.cpu() for block in blocks])


def full_attention(model: Any, ids: torch.Tensor, context: int, steps: int) -> torch.Tensor:
    """What `teacher_forced` gives under full attention, in few forward passes.

    Raises:
        ArgumentError: the model attends through swarm_kv, so that it cannot be its own reference.
    """
    if compat.attention_name(model) == compat.HANDLE:
        raise ArgumentError(
            "this model attends through swarm_kv, so it cannot give the full-attention reference: "
            "call full_attention() before swarm_kv.patch(), or after it was undone"
        )
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
    ids = _sequence(model, ids, context, steps)
    if reference is None:
        reference = full_attention(model, ids, context, steps)
    elif reference.ndim != 2 or reference.shape[0] != steps:
        raise ArgumentError(
            f"`reference` has shape {list(reference.shape)}, but {steps} steps are compared: "
            "make it by full_attention() with the same `context` and `steps`"
        )
    targets = ids[0, context:].cpu()
    chosen, kl, same = 0.0, 0.0, 0
    blocks = _log_probs(model, ids, context, steps, cache_factory, prefill_chunk, stride=1)
    for i, block in enumerate(blocks):
        full, sparse = reference[i : i + 1], block.cpu()
        chosen += sparse[0, targets[i]].item()
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


@torch.no_grad()
def _ask(
    model: Any,
    context: list[int],
    question: list[int],
    new_tokens: int,
    cache_factory: CacheFactory | None,
    prefill_chunk: int | None,
) -> list[int]:
    """Greedy continuation of `context + question`; the question, too, is decoded token by token."""
    session = _Session(model, cache_factory)
    session.prefill(torch.tensor([context], device=model.device), prefill_chunk)
    answer: list[int] = []
    pending = list(question)
    while len(answer) < new_tokens:
        token = pending.pop(0) if pending else answer[-1]
        logits = session.feed(torch.tensor([[token]], device=model.device))
        if not pending:
            answer.append(int(logits[-1].argmax()))
    return answer


def passkey(
    model: Any,
    tokenizer: Any,
    context_tokens: int,
    depths: Sequence[float] = (0.1, 0.35, 0.6, 0.9),
    n: int = 8,
    *,
    cache_factory: CacheFactory | None = None,
    source: str | None = None,
    prefill_chunk: int | None = None,
    seed: int = 0,
) -> Passkey:
    """Hide a five-digit key in real text and ask for it.

    The text is prose because full attention itself fails in repeated filler, and the question is a
    plain completion because small chat models lose the key behind a chat template.

    Args:
        model: a causal language model of transformers, patched or not.
        tokenizer: the model's tokenizer.
        context_tokens (`int`): length of everything before the answer.
        depths (`Sequence[float]`): where keys stand, 0 to 1; the cases take them in turn.
        n (`int`): number of cases; each time through `depths` starts at another place in the text.
        cache_factory (`Callable`, *optional*): makes the cache; the model makes one if not given.
        source (`str`, *optional*): text file to hide keys in; the Python topics if not given.
        prefill_chunk (`int`, *optional*): tokens per prefill call; the whole context if not given.
        seed (`int`, *optional*, defaults to 0): of the keys.

    Returns:
        `Passkey` with `found`, `total` and each case.
    """
    if n < 1 or not depths or not all(0.0 <= depth <= 1.0 for depth in depths):
        raise ArgumentError(f"need `n` ({n}) of at least 1 and `depths` ({depths}) between 0 and 1")

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    start = list(tokenizer("").input_ids)  # the special tokens that this tokenizer puts in front
    question = encode("\n\nThe pass key is")
    numbers = random.Random(seed)
    cases = []
    for i in range(n):
        key = str(numbers.randint(10_000, 99_999))
        needle = encode(f"\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n")
        body = context_tokens - len(start) - len(needle) - len(question)
        if body < 1:
            raise ArgumentError(
                f"`context_tokens` ({context_tokens}) leaves no room for text: "
                f"the key and the question alone take {context_tokens - body} tokens"
            )
        offset = (i // len(depths)) * body
        hay = texts.token_ids(tokenizer, body, source, start=offset)[0].tolist()
        depth = depths[i % len(depths)]
        # In mid-sentence: between paragraphs full attention itself misses the key more often.
        at = int(body * depth)
        context = start + hay[:at] + needle + hay[at:]
        tokens = _ask(model, context, question, 8, cache_factory, prefill_chunk)
        answer = tokenizer.decode(tokens)
        cases.append(PasskeyCase(depth, key, answer, key in answer.replace(" ", "")))
    return Passkey(tuple(cases))
