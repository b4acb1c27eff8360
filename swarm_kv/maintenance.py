"""Where entries go that leave the window, by name, and what is observed to decide it.

A strategy is a function `(lot, config) -> (rows, homes)`, both int64: entry i of the lot joins the
clusters `homes[rows[i]:rows[i + 1]]`, or none. A new one is a function with `@strategy("name")`; a
`SwarmConfig` may also be given the function itself.

What joins a cluster is a *part* of it: parts of one lot make up a segment, see `parts`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import torch

from . import ops
from .config import SwarmConfig
from .layout import Queries
from .registry import Registry

OBSERVED_STEPS = 256
"""Longest observation: W of Eq. 9 is the window, but no more than this."""
SAMPLES = 64
"""Queries out of the last W steps that re-clustering goes by. More of them, or of a longer time,
gave no better layouts of the tail (seven layers of two models)."""
FALLEN = 0.9
"""Drift: recall below this share of what it was."""
REFERENCE = 4
"""Measurements that tell what recall was, and that it has fallen."""

Homes = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Lot:
    """Entries that leave the window together, and the clusters that they may join.

    Attributes:
        keys: [kv_heads, n, head_dim].
        bits: int64 [n, words], in which of the last steps each was active; None: not observed.
        cluster_bits: int64 [clusters, words], the same of the clusters' medoids.
        steps: how many steps that are.
        sizes: int64 [clusters], entries in each, all its parts counted.
        medoid_keys: gives float32 [kv_heads, clusters, head_dim], as precise as memory has them.
    """

    keys: torch.Tensor
    bits: torch.Tensor | None
    cluster_bits: torch.Tensor | None
    steps: int
    sizes: torch.Tensor
    medoid_keys: Callable[[], torch.Tensor]


Strategy = Callable[[Lot, SwarmConfig], Homes]
_STRATEGIES: Registry[Strategy] = Registry("maintenance")
strategy = _STRATEGIES.register
"""Registers a strategy of maintenance under a name."""
names = _STRATEGIES.names
"""Names that `SwarmConfig.maintenance` may be."""
resolve = _STRATEGIES.resolve
"""The strategy of maintenance that a setting names or is."""


def needs_bits(chosen: Strategy) -> bool:
    """Whether `chosen` may look at what was observed: any but the built-in ones that do not."""
    return chosen not in (sequence, min_size, min_diff)


def _one_each(homes: torch.Tensor) -> Homes:
    return torch.arange(len(homes) + 1), homes


def _nowhere(count: int) -> Homes:
    return torch.zeros(count + 1, dtype=torch.int64), torch.empty(0, dtype=torch.int64)


@strategy("sequence")
def sequence(lot: Lot, config: SwarmConfig) -> Homes:
    """Nowhere: blocks of `config.block` neighbours become clusters of their own."""
    return _nowhere(lot.keys.shape[1])


@strategy("swarm")
def swarm(lot: Lot, config: SwarmConfig) -> Homes:
    """Eq. 9: the clusters whose medoids were active when the entry was, see `ops.join_clusters`.

    Args:
        lot: entries and clusters; without observation nothing joins.
        config: `distance`, `tau_online`, `max_replicas`.
    """
    if lot.bits is None or lot.cluster_bits is None or lot.steps == 0:
        return _nowhere(lot.keys.shape[1])
    return ops.join_clusters(
        lot.bits,
        lot.cluster_bits,
        lot.steps,
        config.distance,
        config.tau_online,
        config.max_replicas,
    )


@strategy("min_size")
def min_size(lot: Lot, config: SwarmConfig) -> Homes:
    """The paper's control: each entry to the cluster that is smallest then."""
    sizes, homes = lot.sizes.clone(), []
    if sizes.numel() == 0:
        return _nowhere(lot.keys.shape[1])
    for _ in range(lot.keys.shape[1]):
        homes.append(int(sizes.argmin()))
        sizes[homes[-1]] += 1
    return _one_each(torch.tensor(homes, dtype=torch.int64))


@strategy("min_diff")
def min_diff(lot: Lot, config: SwarmConfig) -> Homes:
    """The paper's other control: each entry to the cluster of the most similar medoid key."""
    medoids = lot.medoid_keys().transpose(0, 1).flatten(1)
    if medoids.shape[0] == 0:
        return _nowhere(lot.keys.shape[1])
    return _one_each(torch.cdist(lot.keys.float().transpose(0, 1).flatten(1), medoids).argmin(1))


def parts(
    rows: torch.Tensor, homes: torch.Tensor, sizes: torch.Tensor, config: SwarmConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Clusters of a segment out of the homes of its entries.

    Entries that join the same cluster are a part of it and lie together, parts in the order of
    their clusters. Where a part would take its cluster beyond `max_size` it splits off and becomes
    one of its own, in pieces of `max_size`. Entries without a home follow, in blocks of `block`
    neighbours that are clusters of their own, as the rest of a clustering does.

    Args:
        rows, homes: int64, as a strategy gives them.
        sizes: int64 [clusters], entries in each.
        config: `max_size`, `block`.

    Returns:
        offsets [parts + 1] int32, members int32, and owner [parts] int64: the cluster that each is
        a part of, -1 for its own.
    """
    joined: dict[int, list[int]] = {}
    free: list[int] = []
    bounds = rows.tolist()
    flat = homes.tolist()
    for entry in range(len(bounds) - 1):
        own = dict.fromkeys(flat[bounds[entry] : bounds[entry + 1]])
        for home in own:
            joined.setdefault(home, []).append(entry)
        if not own:
            free.append(entry)
    made: list[tuple[int, list[int]]] = []
    for home in sorted(joined):
        entries = joined[home]
        fits = int(sizes[home]) + len(entries) <= config.cluster_size
        made += [(home if fits else -1, piece) for piece in _cut(entries, config.cluster_size)]
    made += [(-1, piece) for piece in _cut(free, config.block)]
    lengths = torch.tensor([0, *(len(entries) for _, entries in made)])
    members = torch.tensor([entry for _, entries in made for entry in entries], dtype=torch.int32)
    owner = torch.tensor([home for home, _ in made], dtype=torch.int64)
    return lengths.cumsum(0).int(), members, owner


def _cut(entries: list[int], size: int) -> list[list[int]]:
    return [entries[at : at + size] for at in range(0, len(entries), size)]


class Activity:
    """In which of the last W steps medoids and window entries were active: a ring of W bits each.

    A medoid is active when the step selected its entry. A window entry was not there to be
    selected: it is active when its attention (exact, the mean over heads of the softmax over the
    window) is at least that of the weakest among the strongest `sparsity` share of the window's
    older half. What is newer always gets more, so it must not set the measure.
    """

    def __init__(self, steps: int) -> None:
        self.length = -(-steps // 64) * 64
        self.seen = 0
        self.entries = torch.zeros(0, self.length // 64, dtype=torch.int64)
        self.clusters = torch.zeros(0, self.length // 64, dtype=torch.int64)

    @property
    def steps(self) -> int:
        """Steps that the bits cover."""
        return min(self.seen, self.length)

    @property
    def nbytes(self) -> int:
        """Bytes that the rings hold."""
        return self.entries.nbytes + self.clusters.nbytes

    def copy(self) -> Activity:
        """For a fork: what was observed so far is shared, what follows is not."""
        other = Activity(self.length)
        other.seen = self.seen
        other.entries, other.clusters = self.entries.clone(), self.clusters.clone()
        return other

    def resize(self, entries: int, first: int = 0) -> None:
        """Window entries are now those from `first` on, `entries` of them; new ones at the end."""
        kept = self.entries[first : first + entries]
        self.entries = torch.nn.functional.pad(kept, (0, 0, 0, entries - kept.shape[0]))

    def replace(self, first: int, last: int, count: int) -> None:
        """Clusters `first` to `last` are now `count` others, of which nothing is known."""
        fresh = self.clusters.new_zeros(count, self.clusters.shape[1])
        self.clusters = torch.cat([self.clusters[:first], fresh, self.clusters[last:]])

    def note(self, entries: torch.Tensor, clusters: torch.Tensor) -> None:
        """Add a step: which window entries and which clusters were active, bool."""
        word, bit = divmod(self.seen % self.length, 64)
        for rows, active in ((self.entries, entries), (self.clusters, clusters)):
            rows[:, word] &= ~(torch.ones((), dtype=torch.int64) << bit)
            rows[:, word] |= active.long() << bit
        self.seen += 1


def active_in_window(query: torch.Tensor, keys: torch.Tensor, sparsity: float) -> torch.Tensor:
    """Which window entries a step activates, bool [n]; see `Activity`.

    Args:
        query: [heads, queries, head_dim], scaled.
        keys: [kv_heads, n, head_dim], oldest first.
        sparsity: share of the context that a step selects.
    """
    count = keys.shape[1]
    if count == 0:
        return torch.zeros(0, dtype=torch.bool)
    weights = ops.score_clusters(query, keys, 1.0)
    older = weights[: max(1, count // 2)]
    strongest = max(1, round(sparsity * len(older)))
    return weights >= torch.topk(older, strongest).values[-1]


class RecentQueries:
    """A sample of the queries of the last W steps, evenly spread."""

    def __init__(self, steps: int) -> None:
        self._stride = max(1, steps // SAMPLES)
        self._seen = 0
        self._kept: collections.deque[tuple[int, torch.Tensor]] = collections.deque(
            maxlen=min(steps, SAMPLES)
        )

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def full(self) -> bool:
        """Whether W steps were seen."""
        return len(self._kept) == self._kept.maxlen

    def copy(self) -> RecentQueries:
        """For a fork."""
        other = RecentQueries(1)
        other._stride, other._seen, other._kept = self._stride, self._seen, self._kept.copy()
        return other

    def clear(self) -> None:
        """Forget all, to collect W steps from now on."""
        self._kept.clear()

    def due(self) -> bool:
        """Count a step; whether its query is one of the sample."""
        self._seen += 1
        return (self._seen - 1) % self._stride == 0

    def note(self, query: torch.Tensor, position: int) -> None:
        """Keep a step's query [heads, head_dim] after `position` entries, if it is `due`."""
        self._kept.append((position, query.clone()))

    def crop(self, length: int) -> None:
        """Entries from `length` on are gone, and their queries with them."""
        while self._kept and self._kept[-1][0] > length:
            self._kept.pop()

    def queries(self, position: int) -> Queries | None:
        """The sample [heads, n, head_dim], scaled, each at `position`; None if there is none."""
        if not self._kept:
            return None
        rows = torch.stack([query for _, query in self._kept], 1)
        return Queries(rows, torch.full((rows.shape[1],), position))


@dataclasses.dataclass
class Drift:
    """Tells when recall has fallen clearly below what it was right after the layout was made."""

    first: list[float] = dataclasses.field(default_factory=list)
    latest: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=REFERENCE)
    )

    def note(self, mass: float) -> bool:
        """Add a measurement; whether it has fallen."""
        if len(self.first) < REFERENCE:
            self.first.append(mass)
            return False
        self.latest.append(mass)
        if len(self.latest) < REFERENCE:
            return False
        return sum(self.latest) < FALLEN * sum(self.first)

    def copy(self) -> Drift:
        """For a fork."""
        return Drift(list(self.first), self.latest.copy())
