"""A key among others of its kind: RULER's multi-key retrieval (arXiv 2404.06654)."""

from __future__ import annotations

import random

from .tasks import Riddle, drawn, numbers_of, task

NAMES = (
    "Alice",
    "Anna",
    "Bob",
    "Carol",
    "Daniel",
    "David",
    "Edward",
    "Emma",
    "Frank",
    "George",
    "Henry",
    "Ivan",
    "Jack",
    "James",
    "John",
    "Julia",
    "Kate",
    "Laura",
    "Lucy",
    "Maria",
    "Martin",
    "Mary",
    "Nancy",
    "Oliver",
    "Paul",
    "Peter",
    "Robert",
    "Sarah",
    "Simon",
    "Thomas",
    "Victor",
    "William",
)


@task("multikey")
def multikeys(numbers: random.Random, count: int) -> list[Riddle]:
    """All sentences are alike but for the name; the question names one, the others distract.

    The original's keys are words and its values of seven digits. Its question is an instruction,
    ours a completion in the sentence's own words, which small models understand.
    """
    names = drawn(numbers, NAMES, count, "keys by name")
    return [
        Riddle(
            (f"The magic number of {name} is {key}.",),
            ((f"\n\nThe magic number of {name} is", False), (f" {key}", True)),
        )
        for name, key in zip(names, numbers_of(numbers, count), strict=True)
    ]
