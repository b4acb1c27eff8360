"""Variables that get their value from one another: RULER's variable tracking (arXiv 2404.06654)."""

from __future__ import annotations

import itertools
import random

from .tasks import Riddle, check_count, drawn, numbers_of, task

HOPS = 2
"""Assignments between the number and the variable that is asked about."""

VARIABLES = (
    "apple",
    "basket",
    "bridge",
    "bronze",
    "butter",
    "candle",
    "carpet",
    "castle",
    "circus",
    "copper",
    "cotton",
    "desert",
    "dragon",
    "falcon",
    "feather",
    "flower",
    "forest",
    "garden",
    "ginger",
    "guitar",
    "hammer",
    "harbor",
    "helmet",
    "island",
    "jacket",
    "jungle",
    "kitten",
    "ladder",
    "lemon",
    "lion",
    "marble",
    "market",
    "mirror",
    "monkey",
    "needle",
    "ocean",
    "orange",
    "oyster",
    "palace",
    "parrot",
    "pencil",
    "pepper",
    "piano",
    "pillow",
    "planet",
    "potato",
    "rabbit",
    "ribbon",
    "river",
    "rocket",
    "saddle",
    "salmon",
    "shadow",
    "silver",
    "spider",
    "stone",
    "sugar",
    "temple",
    "thunder",
    "tiger",
    "turtle",
    "valley",
    "velvet",
    "violin",
    "wagon",
    "walnut",
    "whale",
    "winter",
    "yellow",
    "zebra",
)


@task("tracking")
def tracking(numbers: random.Random, count: int) -> list[Riddle]:
    """Chains `VAR a = 12345`, `VAR b = a`, `VAR c = b`; the others' distract.

    The original asks which variables have the value. Here a chain is resolved from its last
    variable on, `VAR c = b`, `VAR b = a`, `VAR a = 12345`: each name and the number is asked for
    with what stands before it given, so that a small model can do it, and one assignment that is
    lost costs one part.
    """
    per_chain = HOPS + 1
    check_count(count, len(VARIABLES) // per_chain, f"chains of {per_chain} variables")
    names = drawn(numbers, VARIABLES, count * per_chain, "variables")
    riddles = []
    for number, value in enumerate(numbers_of(numbers, count)):
        chain = names[number * per_chain : (number + 1) * per_chain]
        needles = [f"VAR {chain[0]} = {value}"]
        needles += [f"VAR {name} = {before}" for before, name in itertools.pairwise(chain)]
        pieces = []
        for name, right in zip(reversed(chain), [*reversed(chain[:-1]), value], strict=True):
            pieces += [(f"\n\nVAR {name} =", False), (f" {right}", True)]
        riddles.append(Riddle(tuple(needles), tuple(pieces)))
    return riddles
