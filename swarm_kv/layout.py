"""How one layer's entries lie on the drives: which clusters, or token order.

With `layout="auto"` and `tau="auto"` the layer's own queries decide. A few of the profile's queries
are held out of the clustering; for each candidate they select through the codes, as decoding steps
will, and the reads that would follow are simulated. Among the candidates that lose next to no
attention against the best one, the one whose reads cost least is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from . import clusterers, ops
from .config import SwarmConfig
from .errors import ArgumentError
from .index import Index, members_of, sequence_blocks
from .selectors import Selector, summary_of
from .simulate import simulate_selections

TAUS = (0.45, 0.6, 0.75)
"""Cluster radii that `tau="auto"` chooses from."""
HELD_OUT = 16
"""Queries of the profile that judge the candidates."""
LEAST_RECALL = 0.98
"""Share of the best candidate's attention mass that a layout must keep to be considered."""
LEAST_REQUEST = 1e-6
"""Cost of a request, in entries, where the settings say 0."""


@dataclasses.dataclass(frozen=True)
class Queries:
    """The profile of a context: its last queries.

    Attributes:
        q: [heads, count, head_dim], not scaled.
        positions: int64 [count], each query's own token.
        lse: float32 [heads, count], log-sum-exp of its scores over all keys that it sees, or None.
    """

    q: torch.Tensor
    positions: torch.Tensor
    lse: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.q.shape[1]

    def pick(self, chosen: torch.Tensor) -> Queries:
        """Those that `chosen`, bool [count] or int64, selects."""
        lse = None if self.lse is None else self.lse[:, chosen]
        return Queries(self.q[:, chosen], self.positions[chosen], lse)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Clusters of a layer's stored entries.

    Attributes:
        name: `clusters` or `sequence`.
        offsets, members: int32, see `ops.cluster`.
        tau: radius of the clusters, None where they have none.
        activations: int32 [entries], how many profile queries activate each; None without profile.
        queries: how many those are.
    """

    name: str
    offsets: torch.Tensor
    members: torch.Tensor
    tau: float | None = None
    activations: torch.Tensor | None = None
    queries: int = 0

    @property
    def overhead(self) -> float:
        """Stored copies per entry."""
        return self.members.numel() / max(1, int(self.members.max()) + 1)


def in_sequence(entries: int, block: int) -> Layout:
    """Token order, in clusters of `block` neighbours."""
    return Layout("sequence", *sequence_blocks(entries, block))


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a layout is chosen for.

    Attributes:
        keys: [kv_heads, tokens, head_dim], those that are not stored included.
        sinks: tokens before the stored ones.
        entries: number of stored ones.
        queries: the profile.
        scale: of the scores.
        stored_bytes: of one entry on the drives.
        index: of a layout: the index that the selector will see.
        selector: what decoding steps select with.
        probes: int64 [entries, words], further signatures of the stored entries, or None.
    """

    keys: torch.Tensor
    sinks: int
    entries: int
    queries: Queries
    scale: float
    stored_bytes: int
    index: Callable[[Layout], Index]
    selector: Selector
    probes: torch.Tensor | None = None

    @property
    def stored(self) -> slice:
        """Place of the stored entries among the tokens."""
        return slice(self.sinks, self.sinks + self.entries)


def choose(problem: Problem, config: SwarmConfig) -> Layout:
    """The layout that `config` asks for.

    Raises:
        ArgumentError: `layout="clusters"` and no radius stays within `max_overhead`.
    """
    if config.layout == "sequence" or len(problem.queries) == 0 or problem.entries == 0:
        return in_sequence(problem.entries, config.block)
    taus = TAUS if config.tau == "auto" else (float(config.tau),)
    if not clusterers.has_radius(config.clusterer):
        taus = taus[:1]
    compared = config.layout == "auto" or len(taus) > 1
    judges = _judges(len(problem.queries), HELD_OUT if compared else 0)
    clustered = _clustered(problem, problem.queries.pick(~judges), taus, config)
    candidates = [layout for layout in clustered if layout.overhead <= config.max_overhead]
    if config.layout == "auto":
        plain = in_sequence(problem.entries, config.block)
        known = clustered[0]  # what is activated does not depend on where it lies
        plain = dataclasses.replace(plain, activations=known.activations, queries=known.queries)
        candidates.insert(0, plain)  # ties are its
    if not candidates:
        raise ArgumentError(
            f"clusters take {min(layout.overhead for layout in clustered):.2f} times the plain KV, "
            f"above `max_overhead` ({config.max_overhead}): raise it, lower `max_replicas`, or use "
            'layout="auto"'
        )
    if len(candidates) == 1 or not judges.any():
        return candidates[0]
    judge = Judge(problem, problem.queries.pick(judges), config)
    verdicts = [judge(layout) for layout in candidates]
    least = LEAST_RECALL * max(verdict.recall for verdict in verdicts)
    good = [i for i, verdict in enumerate(verdicts) if verdict.recall >= least]
    return candidates[min(good, key=lambda i: verdicts[i].cost)]


def _judges(count: int, most: int) -> torch.Tensor:
    """Which of `count` queries are held out, bool [count]: evenly spread, at most half of them."""
    judges = torch.zeros(count, dtype=torch.bool)
    if count > 1:
        judges[torch.linspace(0, count - 1, min(most, count // 2)).long()] = True
    return judges


def _clustered(
    problem: Problem, queries: Queries, taus: tuple[float, ...], config: SwarmConfig
) -> list[Layout]:
    bits = ops.activation_signatures(
        queries.q,
        problem.keys,
        queries.positions,
        config.sparsity,
        config.window,
        problem.sinks,
        problem.scale,
        queries.lse,
        config.heads,
    )[problem.stored]
    count = len(queries)
    if problem.probes is not None:
        bits = torch.cat([bits, problem.probes], dim=1)
        count += 64 * problem.probes.shape[1]
    activations = np.bitwise_count(bits.numpy().view(np.uint64)).sum(axis=1, dtype=np.int32)
    cluster = clusterers.resolve(config.clusterer)
    if config.cold == "auto" and summary_of(problem.selector) is not None:
        config = dataclasses.replace(config, cold="packed")
    with_radius = clusterers.has_radius(config.clusterer)
    layouts = []
    for tau in taus:
        lists = cluster(bits, problem.keys[:, problem.stored], dataclasses.replace(config, tau=tau))
        radius = tau if with_radius else None
        layouts.append(Layout("clusters", *lists, radius, torch.from_numpy(activations), count))
    return layouts


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Of one layout, means over the queries.

    Attributes:
        recall: share of the attention on stored entries that the selected ones have.
        cost: of the reads, in the time that the busiest drive takes to transfer one entry.
    """

    recall: float
    cost: float


class Judge:
    """Lets held-out queries select and reckons what they would get and what it would cost."""

    def __init__(self, problem: Problem, queries: Queries, config: SwarmConfig) -> None:
        self._problem, self._config = problem, config
        self._queries = torch.split(queries.q * problem.scale, 1, dim=1)
        own = queries.positions - problem.sinks - config.window + 1
        self._reach = own.clamp(0, problem.entries).tolist()
        stored = problem.keys[:, problem.stored].contiguous()
        self._attention = [ops.score_clusters(query, stored, 1.0) for query in self._queries]

    def __call__(self, layout: Layout) -> Verdict:
        """Verdict on `layout`."""
        config, problem = self._config, self._problem
        index = problem.index(layout)
        budget = max(1, round(config.sparsity * problem.keys.shape[1]))
        selections = []
        masses = []
        for query, reach, attention in zip(
            self._queries, self._reach, self._attention, strict=True
        ):
            possible = float(attention[:reach].sum())
            if possible == 0:  # all that it looks at came after it, or is always in memory
                continue
            clusters, entries = problem.selector(query, index.cropped(reach), budget, config)
            chosen = members_of(layout.offsets, layout.members, clusters, entries)
            masses.append(float(attention[chosen[chosen < reach]].sum()) / possible)
            selections.append((clusters, entries))
        if not masses:
            return Verdict(1.0, 0.0)
        # No drive's requests are free.
        request = max(config.entry_request_cost(problem.stored_bytes), LEAST_REQUEST)
        _, _, seconds = simulate_selections(
            layout.offsets,
            layout.members,
            selections,
            entries=problem.entries,
            entry_bytes=problem.stored_bytes,
            drives=[(request, 1.0 / problem.stored_bytes)] * len(config.paths),
            placement=config.placement,
            router=config.router,
        )
        return Verdict(sum(masses) / len(masses), float(seconds.mean()))
