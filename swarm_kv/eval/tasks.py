"""What can be asked about sentences hidden in a text, by name.

A task is a function `(random, count) -> riddles`; a new one is a function with `@task("name")`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

from ..errors import ArgumentError
from ..registry import Registry


@dataclasses.dataclass(frozen=True)
class Riddle:
    """Sentences to hide in a text, and a question behind it that they answer.

    Attributes:
        needles: the sentences, in the order in which they are hidden.
        pieces: question and answer as one text, in pieces; with each, whether the model is asked
            for it. The first is given, never asked for.
    """

    needles: tuple[str, ...]
    pieces: tuple[tuple[str, bool], ...]


Task = Callable[[random.Random, int], list[Riddle]]
TASKS: Registry[Task] = Registry("task")
task = TASKS.register
"""Registers a task under a name."""


def numbers_of(numbers: random.Random, count: int) -> list[str]:
    """Different numbers of five digits."""
    return [str(number) for number in numbers.sample(range(10_000, 100_000), count)]


def check_count(count: int, most: int, what: str) -> None:
    """Refuse more than there are.

    Raises:
        ArgumentError: `count` is not in 1 to `most`.
    """
    if not 1 <= count <= most:
        raise ArgumentError(f"{count} {what} are wanted, but there can be 1 to {most}")


def drawn(numbers: random.Random, words: Sequence[str], count: int, what: str) -> list[str]:
    """Different words.

    Raises:
        ArgumentError: there are fewer.
    """
    check_count(count, len(words), what)
    return numbers.sample(list(words), count)
