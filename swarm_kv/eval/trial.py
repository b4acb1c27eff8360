"""One context with everything hidden in it, and what all methods are asked about it."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import texts
from ..errors import ArgumentError
from .tasks import TASKS, Riddle

FIRST, LAST = 0.05, 0.85
"""Needles stand between these shares of the text: outside sinks, and outside what every method
keeps of the end."""
BREAK = "\n\n"
"""Around needles, which may stand in mid-sentence."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A question with its answer.

    Attributes:
        ids: token ids of both.
        asked: positions in `ids`, at least 1, of the tokens that the model is asked for.
        answer: these in words.
        depths: where the needles stand, as shares of the context.
    """

    ids: tuple[int, ...]
    asked: tuple[int, ...]
    answer: str
    depths: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Trial:
    """What every method gets.

    Attributes:
        context: int64 [1, tokens], a text with needles in it.
        following: int64 [1, tokens], how the text goes on.
        questions: by task.
    """

    context: torch.Tensor
    following: torch.Tensor
    questions: Mapping[str, tuple[Question, ...]]

    @property
    def length(self) -> int:
        """Tokens of the context and the longest that comes behind it."""
        longest = [len(one.ids) for asked in self.questions.values() for one in asked]
        return self.context.shape[1] + max([self.following.shape[1], *longest])


def make_trial(
    tokenizer: Any,
    context: int,
    tasks: Sequence[str],
    *,
    questions: int = 12,
    following: int = 0,
    source: str | None = None,
    seed: int = 0,
) -> Trial:
    """Hide what the questions of all tasks are about in one text.

    One context serves all questions, so that a method prefills it once; the tasks' sentences are
    unlike each other, and make each other harder at most. Equal arguments give an equal trial.

    Args:
        tokenizer: the model's tokenizer.
        context (`int`): tokens of the context.
        tasks (`Sequence[str]`): names in `TASKS`.
        questions (`int`, *optional*, defaults to 12): per task.
        following (`int`, *optional*, defaults to 0): further tokens of the text.
        source (`str`, *optional*): the text, see `texts.read_text`; the Python topics if not given.
        seed (`int`, *optional*, defaults to 0): of names, numbers and places.

    Raises:
        ArgumentError: unknown task, more questions than a task has, a context that does not hold
            them, or a text that is too short.
    """
    makers = [TASKS.resolve(name) for name in tasks]
    numbers = random.Random(seed)
    riddles = [riddle for make in makers for riddle in make(numbers, questions)]

    encode = functools.partial(texts.encode, tokenizer)
    start = texts.opening(tokenizer)
    needles = [
        [encode(f"{BREAK}{needle}{BREAK}") for needle in riddle.needles] for riddle in riddles
    ]
    taken = len(start) + sum(len(ids) for group in needles for ids in group)
    body = context - taken
    if body < taken:
        raise ArgumentError(
            f"`context` ({context}) must be at least {2 * taken} tokens: {len(riddles)} questions "
            f"hide {taken} tokens in it, and half of it at least is to be text. Give a longer "
            "context or fewer questions"
        )
    text = texts.token_ids(tokenizer, body + following, source)[0].tolist()
    places = _places(numbers, [len(group) for group in needles], body)
    context_ids, depths = _hide(start, text[:body], needles, places)
    asked = [
        _question(tokenizer, encode, riddle, depth)
        for riddle, depth in zip(riddles, depths, strict=True)
    ]
    return Trial(
        torch.tensor([context_ids]),
        torch.tensor([text[body:]], dtype=torch.int64),
        {
            name: tuple(asked[number * questions : (number + 1) * questions])
            for number, name in enumerate(tasks)
        },
    )


def _places(numbers: random.Random, sizes: Sequence[int], body: int) -> list[list[int]]:
    """Places in a text of `body` tokens for groups of needles, evenly spread; a group's ascend."""
    count = sum(sizes)
    slots = [int(body * (FIRST + (LAST - FIRST) * (slot + 0.5) / count)) for slot in range(count)]
    numbers.shuffle(slots)
    dealt = iter(slots)
    return [sorted(next(dealt) for _ in range(size)) for size in sizes]


def _hide(
    start: list[int],
    text: list[int],
    needles: Sequence[Sequence[list[int]]],
    places: Sequence[Sequence[int]],
) -> tuple[list[int], list[tuple[float, ...]]]:
    """The context, and where the needles of each group stand in it, as shares."""
    total = len(start) + len(text) + sum(len(ids) for group in needles for ids in group)
    context, at = list(start), 0
    depths: list[list[float]] = [[] for _ in needles]
    in_order = sorted(
        (place, number, part)
        for number, group in enumerate(places)
        for part, place in enumerate(group)
    )
    for place, number, part in in_order:
        context += text[at:place]
        depths[number].append(len(context) / total)
        context += needles[number][part]
        at = place
    return context + text[at:], [tuple(group) for group in depths]


def _question(tokenizer: Any, encode: Any, riddle: Riddle, depths: tuple[float, ...]) -> Question:
    ids: list[int] = []
    asked: list[int] = []
    for text, wanted in riddle.pieces:
        for token in encode(text):
            # A space before a number is a token of its own in some vocabularies, and no answer.
            if wanted and tokenizer.decode([token]).strip():
                asked.append(len(ids))
            ids.append(token)
    answer = "".join(text for text, wanted in riddle.pieces if wanted).strip()
    return Question(tuple(ids), tuple(asked), answer, depths)
