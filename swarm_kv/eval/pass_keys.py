"""One key per text, given back in the model's own words."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence
from typing import Any

import torch

from .. import texts
from ..errors import ArgumentError
from .session import CacheFactory, Session


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


def _ask(
    model: Any,
    context: list[int],
    question: list[int],
    new_tokens: int,
    cache_factory: CacheFactory | None,
    prefill_chunk: int | None,
) -> list[int]:
    """Greedy continuation of `context + question`; the question, too, is decoded token by token."""
    session = Session(model, cache_factory)
    session.prefill(torch.tensor([context]), prefill_chunk)
    answer: list[int] = []
    pending = list(question)
    while len(answer) < new_tokens:
        token = pending.pop(0) if pending else answer[-1]
        logits = session.feed(torch.tensor([[token]]))
        if not pending:
            answer.append(int(logits[0, -1].argmax()))
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
    """Hide a five-digit key in real text and ask for it, in a context of its own each time.

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

    encode = functools.partial(texts.encode, tokenizer)
    start = texts.opening(tokenizer)
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
