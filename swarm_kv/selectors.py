"""Which stored entries a decoding step reads, by name.

A selector is a function `(query, index, budget, config) -> (clusters, entries)`: clusters that are
read whole and entries that are read one by one, both int64 numbers through the layer. A new one is
a function with `@selector("name")`; a `SwarmConfig` may also be given the function itself.

What a selector ranks by beyond the codes is its summary (`swarm_kv.summary`): it finds it as
`index.summary`, medoids unless it names another one with `@selector("name", summary=...)`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import ops
from .config import SwarmConfig
from .index import Index
from .medoids import Medoids
from .registry import Registry
from .summary import Clustered, Summarise

Selection = tuple[torch.Tensor, torch.Tensor]
Selector = Callable[[torch.Tensor, Index, int, SwarmConfig], Selection]

_NONE = torch.empty(0, dtype=torch.int64)
_SELECTORS: Registry[Selector] = Registry("selector")
names = _SELECTORS.names
"""Names that `SwarmConfig.selector` may be."""
resolve = _SELECTORS.resolve
"""The selector that a setting names or is."""


def medoids(of: Clustered, config: SwarmConfig) -> Medoids:
    """The summary that a selector has unless it names another one."""
    return Medoids.build(
        of.keys, of.offsets, of.members, of.weights, config.representative, config.medoid_bits
    )


def selector(name: str, summary: Summarise | None = medoids) -> Callable[[Selector], Selector]:
    """Registers a selector under a name, and what it ranks by: None for nothing but codes."""

    def register(function: Selector) -> Selector:
        function.summary = summary  # type: ignore[attr-defined]
        return _SELECTORS.register(name)(function)

    return register


def summary_of(chosen: Selector) -> Summarise | None:
    """What makes the summary that `chosen` ranks by; medoids for a function that names none."""
    return getattr(chosen, "summary", medoids)


@selector("two_level", summary=None)
def two_level(query: torch.Tensor, index: Index, budget: int, config: SwarmConfig) -> Selection:
    """Codes score every entry; clusters are taken by the attention they bring per read cost.

    A share of the budget (`single_share`) then goes to the strongest entries outside them.

    Args:
        query: [heads, queries, head_dim], already scaled.
        index: of the layer's stored entries.
        budget: entries to read.
        config: `single_share`.
    """
    return ops.select_two_level(
        index.probabilities(query),
        index.offsets,
        index.members,
        budget,
        index.request_cost,
        config.single_share,
    )


@selector("codes", summary=None)
def codes(query: torch.Tensor, index: Index, budget: int, config: SwarmConfig) -> Selection:
    """The strongest entries by their codes, one by one; clusters only decide where they lie."""
    probabilities = index.probabilities(query)
    return ops.select_two_level(probabilities, index.offsets, index.members, budget, 0.0, 1.0)


@selector("interval", summary=None)
def interval(query: torch.Tensor, index: Index, budget: int, config: SwarmConfig) -> Selection:
    """Codes score every entry; intervals of the order in which the entries lie are read whole.

    They are the ones that bring the most attention for what reading them costs, see
    `ops.select_intervals`.

    Args:
        query: [heads, queries, head_dim], already scaled.
        index: of the layer's stored entries.
        budget: entries to read.
        config: not looked at.
    """
    members = index.members
    if index.limit < index.entries:
        members = members[members < index.limit]
    return _NONE, ops.select_intervals(
        index.probabilities(query), members, budget, index.request_cost
    )


@selector("medoid")
def medoid(query: torch.Tensor, index: Index, budget: int, config: SwarmConfig) -> Selection:
    """The paper's: clusters by the softmax of query times medoid key, until the budget is met."""
    scores = index.known(Medoids).score(query)
    return ops.select_clusters(scores, index.offsets, index.members, budget), _NONE
