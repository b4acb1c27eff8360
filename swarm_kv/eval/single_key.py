"""Pass keys: one number of each kind, so that a context holds several and each is the only one."""

from __future__ import annotations

import random

from .tasks import Riddle, drawn, numbers_of, task

KINDS = (
    "pass key",
    "door code",
    "house number",
    "safe combination",
    "bank account",
    "library card",
    "train ticket",
    "patient record",
    "customer invoice",
    "town population",
    "monthly salary",
    "garden area",
    "prize money",
    "bridge height",
    "product label",
    "phone extension",
)
"""No two share a word: a small model takes one number for another."""


@task("passkey")
def passkeys(numbers: random.Random, count: int) -> list[Riddle]:
    """The question names the kind; nothing else in the text speaks of it."""
    kinds = drawn(numbers, KINDS, count, "pass keys of different kinds")
    return [
        Riddle(
            (f"The {kind} is {key}. Remember it. {key} is the {kind}.",),
            ((f"\n\nThe {kind} is", False), (f" {key}", True)),
        )
        for kind, key in zip(kinds, numbers_of(numbers, count), strict=True)
    ]
