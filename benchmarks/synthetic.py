"""Keys and queries of any length that behave like those of a model where profiling is concerned.

A text moves through topics that it comes back to. A key is the sum of what its head always holds (a
few large channels), its topic as loudly as the token matters, and its own noise; a query asks for a
few topics, some far more often than others. At 16K entries and 1,024 queries, a third of the
entries is activated by fewer than 8 queries, the median by 40, a twentieth by more than 350, and
clusters of more than one entry have 9 on average: Gemma 3 270M has 20 to 60 %, 1 to 40, 400 to 670
and 5 to 10. Not a model: for time and memory only, never for accuracy.
"""

from __future__ import annotations

import dataclasses

import torch

TOPICS = 85
"""A longer text says more on each."""
PASSAGE = 48
"""Tokens that a passage on one topic lasts."""
WANTED = 32
"""Topics that one query asks for."""
STAY = 16
"""Queries that ask for the same topics before others come, as steps that follow one another do."""
POPULARITY = 0.5
"""Topic number n is asked for in proportion to 1 / (n + 4) to this power."""
KEY_NOISE = 1.0
SHARPNESS = 4.0
BLOCK = 16384


@dataclasses.dataclass(frozen=True)
class Context:
    """One layer: keys [kv_heads, entries, dim], queries [heads, count, dim], both half precision.

    `positions` [count] are the queries' own tokens, the last ones of the context.
    """

    keys: torch.Tensor
    queries: torch.Tensor
    positions: torch.Tensor
    scale: float


def context(
    entries: int, queries: int, *, heads: int = 32, kv_heads: int = 8, dim: int = 128, seed: int = 0
) -> Context:
    random = torch.Generator().manual_seed(seed)
    centres = torch.nn.functional.normalize(
        torch.randn(kv_heads, TOPICS, dim, generator=random), dim=-1
    )
    offset = torch.zeros(kv_heads, 1, dim)
    offset[:, :, :4] = 2.0
    passages = torch.randint(TOPICS, (-(-entries // PASSAGE),), generator=random)
    topic = passages.repeat_interleave(PASSAGE)[:entries]
    keys = torch.empty(kv_heads, entries, dim, dtype=torch.float16)
    for first in range(0, entries, BLOCK):
        part = slice(first, min(first + BLOCK, entries))
        noise = torch.randn(kv_heads, part.stop - first, dim, generator=random)
        loudness = 0.2 + torch.rand(part.stop - first, 1, generator=random)
        own = noise * (KEY_NOISE / dim**0.5)
        keys[:, part] = loudness * centres[:, topic[part]] + offset + own
    popularity = (torch.arange(TOPICS) + 4.0) ** -POPULARITY
    aims = []
    for first in range(0, queries, STAY):
        wanted = torch.multinomial(popularity, WANTED, generator=random)
        strength = 0.7 + 0.6 * torch.rand(min(STAY, queries - first), len(wanted), generator=random)
        aims.append(strength @ centres[:, wanted])
    aim = torch.cat(aims, dim=1).repeat_interleave(heads // kv_heads, 0)
    aim = aim + 0.1 * torch.randn(heads, queries, dim, generator=random)
    return Context(
        keys=keys,
        queries=(aim * SHARPNESS * dim**0.5).half(),
        positions=torch.arange(entries - queries, entries),
        scale=dim**-0.5,
    )
