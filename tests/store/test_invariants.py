"""What holds for any input: clusters, fetches and sequences against models of a few lines."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from swarm_kv import baselines, ops, selectors
from swarm_kv.errors import CapacityError
from swarm_kv.reference import unpack_bits
from swarm_kv.sequence import Geometry, Sequence
from swarm_kv.store import Wanted

from .helpers import Data, assert_holds, fetch_all, open_store, pack

pytestmark = pytest.mark.timeout(300)

QUICK = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
DRIVES = ("memory 0", "memory 1", "memory 2")


# ---- clustering


@st.composite
def signatures(draw: st.DrawFn) -> Tensor:
    """Bits [entries, words]: rows near a few prototypes, so that clusters of all sizes form."""
    entries, words = draw(st.integers(1, 40)), draw(st.integers(1, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    density = draw(st.sampled_from([0.02, 0.2, 0.5]))
    noise = draw(st.sampled_from([0.0, 0.05, 0.3]))
    kinds = torch.rand(draw(st.integers(1, 5)), words, 64, generator=generator) < density
    chosen = torch.randint(0, len(kinds), (entries,), generator=generator)
    bits = kinds[chosen] ^ (torch.rand(entries, words, 64, generator=generator) < noise)
    weights = torch.tensor([1 << b if b < 63 else -(1 << 63) for b in range(64)])
    return (bits * weights).sum(-1)


@QUICK
@given(
    bits=signatures(),
    tau=st.sampled_from([0.0, 0.3, 0.6, 0.95]),
    max_size=st.integers(1, 12),
    max_replicas=st.integers(1, 4),
    min_activation=st.integers(1, 20),
)
def test_clusters(
    bits: Tensor, tau: float, max_size: int, max_replicas: int, min_activation: int
) -> None:
    offsets, members = ops.cluster(
        bits,
        tau=tau,
        max_size=max_size,
        max_replicas=max_replicas,
        min_activation=min_activation,
        cold="single",
    )
    entries = len(bits)
    bounds = itertools.pairwise(offsets.tolist())
    clusters = [members[first:last].tolist() for first, last in bounds]
    assert offsets[0] == 0
    assert offsets[-1] == len(members)
    assert set(members.tolist()) == set(range(entries))
    assert members.bincount(minlength=entries).max() <= max_replicas
    active = [set(row.nonzero().flatten().tolist()) for row in unpack_bits(bits)]
    covered: set[int] = set()
    for cluster in clusters:
        medoid = cluster[0]
        assert 1 <= len(cluster) <= max_size
        assert len(set(cluster)) == len(cluster)
        assert medoid not in covered
        covered.update(cluster)
        for other in cluster[1:]:
            common, union = active[medoid] & active[other], active[medoid] | active[other]
            assert 1 - len(common) / len(union) <= tau + 1e-12
            assert len(active[other]) >= min_activation


# ---- fetching


@st.composite
def cluster_lists(draw: st.DrawFn, entries: int) -> tuple[list[list[int]], list[int]]:
    """Clusters that hold some of `entries` entries, some several times, and the loose others."""
    order = draw(st.permutations(range(entries)))
    clustered = draw(st.integers(0, entries))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, clustered - 1)), max_size=8)))
    bounds = [0, *(cut for cut in cuts if cut < clustered), clustered]
    clusters = [list(order[a:b]) for a, b in itertools.pairwise(bounds) if a < b]
    if clusters:
        more = st.lists(st.sampled_from(order[:clustered]), unique=True, min_size=1, max_size=6)
        clusters += draw(st.lists(more, max_size=4))
    return clusters, list(order[clustered:])


@st.composite
def layers(draw: st.DrawFn) -> list[tuple[list[list[int]], list[int]]]:
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=3))
    return [draw(cluster_lists(size)) for size in sizes]


@QUICK
@given(
    layer=layers(),
    dim=st.integers(1, 40),
    seed=st.integers(0, 1000),
    steps=st.lists(st.data(), min_size=1, max_size=4),
    placement=st.sampled_from(["round_robin", "fixed_start", "sequential", "weighted"]),
    staging=st.sampled_from([48 << 10, 1 << 20]),
)
def test_a_fetch_is_a_union(
    layer: list[tuple[list[list[int]], list[int]]],
    dim: int,
    seed: int,
    steps: list[Any],
    placement: str,
    staging: int,
) -> None:
    """Several in a row, so that later ones find part of what they want in the cluster cache."""
    store = open_store(DRIVES, engine="memory", placement=placement, staging_bytes=staging)
    sizes = [1 + max(itertools.chain(*clusters, loose)) for clusters, loose in layer]
    parts = [Data.random(size, 2, dim, seed=seed + i) for i, size in enumerate(sizes)]
    segments = tuple(
        part.write(store, pack(*lists)) for part, lists in zip(parts, layer, strict=True)
    )
    rows = torch.cat([part.rows() for part in parts])
    numbered: list[set[int]] = []  # the model: each cluster as a set of numbers through the layer
    base = 0
    for part, (clusters, _) in zip(parts, layer, strict=True):
        numbered += [{base + entry for entry in cluster} for cluster in clusters]
        base += part.entries
    for step in steps:
        clusters = (
            step.draw(st.lists(st.sampled_from(range(len(numbered))), max_size=6))
            if numbered
            else []
        )
        entries = step.draw(st.lists(st.integers(0, base - 1), max_size=8))
        limit = step.draw(st.integers(0, base + 2))
        purpose = step.draw(st.sampled_from(["decode", "stream"]))
        got = fetch_all(
            store,
            segments,
            parts[0],
            torch.tensor(clusters, dtype=torch.int64),
            torch.tensor(entries, dtype=torch.int64),
            limit=limit,
            purpose=purpose,
        )
        union = set(entries).union(*(numbered[cluster] for cluster in clusters))
        assert_holds(got, rows, [number for number in union if number < limit])
    store.close()


# ---- sequences


GEOMETRY = Geometry(heads=4, kv_heads=2, head_dim=8, dtype=torch.float32, scale=8**-0.5)


@dataclasses.dataclass
class Pair:
    """A sequence, and the numbers of the tokens that it should hold."""

    sequence: Sequence
    tokens: list[int]


class SequenceMachine(RuleBasedStateMachine):
    """Growing, cropping and forking against lists of tokens."""

    @initialize(
        seed=st.integers(0, 1000),
        replicas=st.integers(1, 3),
        selector=st.sampled_from(["interval", "medoid", *baselines.names()]),
        layout=st.sampled_from(["auto", "clusters", "sequence"]),
        clusterer=st.sampled_from(["hypergraph", "swarm"]),
        estimate=st.booleans(),
    )
    def start(
        self,
        seed: int,
        replicas: int,
        selector: str,
        dram: str = "4MiB",
        layout: str = "auto",
        clusterer: str = "hypergraph",
        estimate: bool = False,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.store = open_store(
            DRIVES,
            engine="memory",
            dram_bytes=dram,
            staging_bytes=48 << 10,
            window=4,
            flush=2,
            sinks=1,
            block=2,
            profile_queries=6,
            min_activation=1,
            max_replicas=replicas,
            sparsity=0.3,
            layout=layout,
            clusterer=clusterer,
            max_overhead=replicas,
            estimate_unfetched=estimate,
        )
        self.keys = torch.empty(2, 0, 8)
        self.values = torch.empty(2, 0, 8)
        chosen = selectors.resolve(selector)
        self.pairs = [Pair(Sequence(self.store, GEOMETRY, "layer 0", chosen), [])]
        self.at_start = self.held()

    def held(self) -> dict[str, Any]:
        counters = self.store.counters()
        uses = ("staging", "window", "index", "window_entries", "cached_entries")
        stored = {name: counters[name] for name in ("stored_bytes", "stored_entries")}
        return {**{use: counters["dram"][use] for use in uses}, **stored}

    def pick(self, data: Any) -> Pair:
        return data.draw(st.sampled_from(self.pairs))

    def grow(self, pair: Pair, count: int) -> tuple[Tensor, Tensor]:
        first = self.keys.shape[1]
        k, v = torch.randn(2, 2, count, 8, generator=self.generator)
        self.keys, self.values = torch.cat([self.keys, k], 1), torch.cat([self.values, v], 1)
        pair.tokens += range(first, first + count)
        return k, v

    @rule(data=st.data(), count=st.integers(1, 3))
    def append(self, data: Any, count: int) -> None:
        pair = self.pick(data)
        pair.sequence.append(*self.grow(pair, count))

    @rule(data=st.data(), count=st.sampled_from([1, 2, 5, 8, 13, 16]))
    def ingest(self, data: Any, count: int) -> None:
        pair = self.pick(data)
        queries = torch.randn(4, count, 8, generator=self.generator)
        pair.sequence.ingest(*self.grow(pair, count), queries)

    @rule(data=st.data())
    def settle(self, data: Any) -> None:
        sequence = self.pick(data).sequence
        sequence.settle()
        assert len(sequence.window) < 4 + 2  # less than `flush` beyond `window`

    @rule(data=st.data())
    def prepare(self, data: Any) -> None:
        sequence = self.pick(data).sequence
        sequence.prepare()
        assert sequence.stored is None or sequence.stored.profile is None

    @rule(data=st.data(), count=st.sampled_from([0, 1, 3, 6, 8, 12]))
    def crop(self, data: Any, count: int) -> None:
        pair = self.pick(data)
        count = min(count, len(pair.tokens))
        pair.sequence.crop(count)
        del pair.tokens[len(pair.tokens) - count :]

    @precondition(lambda self: len(self.pairs) < 4)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        pair = self.pick(data)
        self.pairs.append(Pair(pair.sequence.fork(), list(pair.tokens)))

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(data=st.data())
    def drop(self, data: Any) -> None:
        pair = self.pick(data)
        self.pairs = [other for other in self.pairs if other is not pair]

    @rule(data=st.data())
    def decode(self, data: Any) -> None:
        """A sparse read through the cluster cache, whose slots must hold the right tokens."""
        pair = self.pick(data)
        sequence = pair.sequence
        index = sequence.index()
        if index is None:
            return
        chosen = data.draw(st.lists(st.integers(0, len(index.offsets) - 2), max_size=4))
        clusters = torch.tensor(chosen, dtype=torch.int64)
        single = torch.tensor([data.draw(st.integers(0, sequence.limit - 1))])
        assert sequence.stored is not None
        wanted = {int(single)}
        for c in chosen:
            wanted.update(index.members[index.offsets[c] : index.offsets[c + 1]].tolist())
        got = {}
        row = Wanted(sequence.stored.segments, clusters, single, sequence.limit)
        with self.store.fetch([row]) as fetch:
            for ((ids, slots),) in itertools.chain([fetch.resident], fetch.rounds()):
                got.update(self.rows_of(sequence, ids, slots))
        assert set(got) == {number for number in wanted if number < sequence.limit}
        for number, (k, v) in got.items():
            token = pair.tokens[len(sequence.sinks) + number]
            assert torch.equal(k, self.keys[:, token])
            assert torch.equal(v, self.values[:, token])

    @staticmethod
    def rows_of(sequence: Sequence, ids: Tensor, slots: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        keys, values = sequence.gather(slots)
        return {n: (keys[:, i], values[:, i]) for i, n in enumerate(ids.tolist())}

    @invariant()
    def entries_are_the_models(self) -> None:
        for pair in getattr(self, "pairs", ()):
            sequence = pair.sequence
            assert len(sequence) == len(pair.tokens)
            assert len(sequence.sinks) == min(1, len(pair.tokens))
            parts = (
                sequence.gather(sequence.sinks.slots),
                sequence.read_all(),
                sequence.gather(sequence.window.slots),
            )
            keys, values = (torch.cat(part, 1) for part in zip(*parts, strict=True))
            assert torch.equal(keys, self.keys[:, pair.tokens])
            assert torch.equal(values, self.values[:, pair.tokens])

    @invariant()
    def the_index_fits_what_is_stored(self) -> None:
        for pair in getattr(self, "pairs", ()):
            stored = pair.sequence.stored
            if stored is None:
                assert pair.sequence.limit == 0
                continue
            assert stored.entries == sum(segment.entries for segment in stored.segments)
            clusters = sum(segment.clusters for segment in stored.segments)
            assert clusters == len(stored.index.offsets) - 1
            assert 0 < pair.sequence.limit <= stored.entries
            wanted = selectors.summary_of(pair.sequence.selector)
            assert (stored.index.summary is None) == (wanted is None)
            assert (stored.means is not None) == self.store.config.estimate_unfetched
            if stored.means is not None:
                assert stored.means.sizes.sum() == stored.means.group_of.numel() == stored.entries

    def teardown(self) -> None:
        if hasattr(self, "pairs"):
            self.pairs.clear()
            gc.collect()
            assert self.held() == self.at_start
            self.store.close()


TestSequences = SequenceMachine.TestCase
TestSequences.settings = settings(QUICK, max_examples=40, stateful_step_count=30)


def test_the_model_would_notice_a_lost_token() -> None:
    machine = SequenceMachine()
    machine.start(0, 2, "interval")
    pair = machine.pairs[0]
    pair.sequence.ingest(*machine.grow(pair, 20), torch.randn(4, 20, 8))
    machine.entries_are_the_models()
    assert pair.sequence.limit == 15
    pair.tokens[7], pair.tokens[8] = pair.tokens[8], pair.tokens[7]
    with pytest.raises(AssertionError):
        machine.entries_are_the_models()
    del pair
    machine.teardown()


def test_nothing_is_left_where_the_budget_ends() -> None:
    """Growing until `dram_bytes` refuses keeps what was there, and gives everything back."""
    machine = SequenceMachine()
    machine.start(0, 2, "medoid", "256KiB")
    tokens: list[int] = []

    def grow() -> None:
        pair = machine.pairs[0]
        for _ in range(100):
            machine.entries_are_the_models()
            tokens[:] = pair.tokens
            pair.sequence.ingest(*machine.grow(pair, 64), torch.randn(4, 64, 8))

    with pytest.raises(CapacityError, match=r"`dram_bytes` \(262144\) is too small"):
        grow()
    assert len(tokens) > 64
    keys, _ = machine.pairs[0].sequence.read_all()
    assert torch.equal(keys, machine.keys[:, tokens[1 : 1 + keys.shape[1]]])
    machine.teardown()
