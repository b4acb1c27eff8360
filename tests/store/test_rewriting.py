"""Nothing is lost, whatever is merged, re-clustered, forked or cropped."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm_kv import baselines, errors, maintenance, recode, rewrite, selectors
from swarm_kv.background import Background
from swarm_kv.baselines import infllm, quest
from swarm_kv.config import SwarmConfig
from swarm_kv.errors import ArgumentError, CapacityError, StorageError
from swarm_kv.index import members_of
from swarm_kv.medoids import Medoids
from swarm_kv.sequence import Geometry, Sequence
from swarm_kv.store import NOTHING, Store, Wanted
from swarm_kv.summary import Clustered

from .helpers import open_store

pytestmark = pytest.mark.timeout(120)

HEADS, KV_HEADS, DIM = 4, 2, 16
GEOMETRY = Geometry(HEADS, KV_HEADS, DIM, torch.float32, DIM**-0.5)
SINKS, WINDOW, FLUSH, PREFILL = 2, 32, 4, 160
TOPICS = 8


@pytest.fixture(autouse=True)
def small_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "MERGED", 32)
    monkeypatch.setattr(recode, "LEAST", 32)


def tokens(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Keys of a few topics, dealt out in turn; each query asks for one topic."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, KV_HEADS, count, DIM, generator=generator)
    topics = 3 * torch.randn(TOPICS, DIM, generator=generator)
    k = 0.5 * k + topics[torch.arange(count) % TOPICS]
    asked = torch.randint(TOPICS, (count,), generator=generator)
    return k, v, topics[asked].expand(HEADS, count, DIM).clone()


def check_summary(summary: Any, of: Clustered) -> None:
    """It is what would be made of all entries at once."""
    if isinstance(summary, infllm.Representatives):  # each time of other queries: a mean of members
        assert summary.vectors.shape[1] == of.clusters
        top, bottom = quest.Bounds.build(of, SwarmConfig(paths="/")).vectors.chunk(2, 2)
        assert (summary.vectors <= top + 0.01).all()
        assert (summary.vectors >= bottom - 0.01).all()
        return
    again = summary.alike(of)
    for field in dataclasses.fields(summary):
        assert torch.equal(getattr(summary, field.name), getattr(again, field.name)), field.name


class Run:
    """A sequence that is decoded, and the tokens that it should hold."""

    def __init__(self, steps: int = 400, seed: int = 0, **settings: Any) -> None:
        small = {
            "engine": "memory",
            "sparsity": 0.2,
            "window": WINDOW,
            "sinks": SINKS,
            "flush": FLUSH,
            "block": 4,
            "max_size": 16,
            "min_activation": 2,
        }
        paths = [f"/{number}" for number in range(4)]
        self.store: Store = open_store(paths, **{**small, **settings})
        self.k, self.v, self.q = tokens(PREFILL + steps, seed)
        self.start()

    def start(self) -> None:
        """Prefill."""
        selector = selectors.resolve(self.store.config.selector)
        self.sequence = Sequence(self.store, GEOMETRY, "layer 0", selector)
        self.tokens = list(range(PREFILL))
        part = (tensor[:, :PREFILL] for tensor in (self.k, self.v, self.q))
        self.sequence.ingest(*part)
        self.sequence.prepare()

    def fork(self) -> Run:
        other = Run.__new__(Run)
        vars(other).update(vars(self))
        other.sequence, other.tokens = self.sequence.fork(), list(self.tokens)
        return other

    def crop(self, count: int) -> None:
        self.sequence.crop(count)
        del self.tokens[len(self.tokens) - count :]

    def step(self, token: int) -> None:
        sequence = self.sequence
        sequence.prepare()
        sequence.append(self.k[:, token : token + 1], self.v[:, token : token + 1])
        self.tokens.append(token)
        index = sequence.index()
        if index is not None:
            query = self.q[:, token : token + 1] * GEOMETRY.scale
            budget = max(1, round(sequence.config.sparsity * len(sequence)))
            chosen = sequence.selector(query, index, budget, sequence.config)
            sequence.observe(query, members_of(index.offsets, index.members, *chosen))
        sequence.settle()

    def decode(self, first: int, last: int, check_every: int = 50) -> None:
        for token in range(first, last):
            self.step(token)
            if token % check_every == 0:
                self.check()

    def check(self) -> None:
        """Every token's key and value, and an index of just these."""
        sequence = self.sequence
        parts = (
            sequence.gather(sequence.sinks.slots),
            sequence.read_all(),
            sequence.gather(sequence.window.slots),
        )
        keys, values = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        assert torch.equal(keys, self.k[:, self.tokens])
        assert torch.equal(values, self.v[:, self.tokens])
        stored = sequence.stored
        if stored is None:
            assert sequence.limit == 0
            return
        index = stored.index
        assert stored.entries == sum(segment.entries for segment in stored.segments)
        assert set(index.members.tolist()) == set(range(stored.entries))
        clusters = sum(segment.clusters for segment in stored.segments)
        assert len(index.owner) == len(index.offsets) - 1 == clusters
        if sequence.limit == stored.entries:
            assert torch.equal(index.codes, index.codebook.encode(sequence.read_all()[0]))
        assert (index.owner <= torch.arange(clusters)).all()
        assert torch.equal(index.owner[index.owner.long()], index.owner)  # no part owns another
        self._check_lists()
        if isinstance(index.summary, Medoids):
            medoids = index.members[index.offsets[:-1].long()].long()
            within = medoids < sequence.limit
            keys = sequence.read_all()[0][:, medoids[within]].half()
            assert torch.equal(index.summary.keys[:, within], keys)
        elif index.summary is not None and sequence.limit == stored.entries:
            keys = sequence.read_all()[0]
            check_summary(index.summary, Clustered(keys, index.offsets, index.members))

    def _check_lists(self) -> None:
        """The index numbers clusters and entries as the store does: a fetch of each must agree."""
        stored = self.sequence.stored
        assert stored is not None
        index = stored.index
        for cluster in range(0, len(index.owner), 7):
            wanted = torch.tensor([cluster])
            got: set[int] = set()
            row = Wanted(stored.segments, wanted, wanted[:0], self.sequence.limit)
            with self.store.fetch([row], purpose="stream") as fetch:
                for ((ids, _),) in itertools.chain([fetch.resident], fetch.rounds()):
                    got.update(ids.tolist())
            begin, end = index.offsets[cluster : cluster + 2].tolist()
            assert got == {n for n in index.members[begin:end].tolist() if n < self.sequence.limit}


def counting(monkeypatch: pytest.MonkeyPatch) -> list[rewrite.Task]:
    """Tasks that were carried out, filled as they are."""
    done: list[rewrite.Task] = []
    work = rewrite.rewrite

    def counted(task: rewrite.Task, check: Callable[[], None]) -> rewrite.Rewritten:
        result = work(task, check)
        done.append(task)
        return result

    monkeypatch.setattr(rewrite, "rewrite", counted)
    return done


@pytest.mark.parametrize("recluster", ["auto", "off"])
@pytest.mark.parametrize("selector", ["interval", "medoid"])
@pytest.mark.parametrize("name", maintenance.names())
def test_no_strategy_loses_an_entry(
    name: str, selector: str, recluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = counting(monkeypatch)
    clusterer = "hypergraph" if selector == "interval" else "swarm"
    run = Run(maintenance=name, selector=selector, recluster=recluster, clusterer=clusterer)
    run.decode(PREFILL, PREFILL + 400)
    run.check()
    assert run.sequence.stored is not None
    assert len(done) >= 8
    assert len(run.sequence.stored.segments) < 16  # and not a hundred
    assert all((task.queries is not None) == (recluster == "auto") for task in done)


@pytest.mark.parametrize("recluster", ["auto", "off"])
@pytest.mark.parametrize("name", baselines.names())
def test_baselines_follow_what_is_written_anew(
    name: str, recluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = counting(monkeypatch)
    more = {**baselines.settings(name), "flush": FLUSH, "recluster": recluster}
    run = Run(**more)
    run.decode(PREFILL, PREFILL + 200)
    other = run.fork()
    run.decode(PREFILL + 200, PREFILL + 250)
    other.crop(60)  # beyond the window
    other.check()
    other.decode(PREFILL + 250, PREFILL + 350)
    for one in (run, other):
        one.check()
    assert len(done) >= 8
    assert run.sequence.stored is not None
    summary: Any = run.sequence.stored.index.summary
    assert (summary is None) == (name in ("full", "streaming"))
    if summary is None:
        return
    # Of other entries, it is another one.
    keys, index = run.sequence.read_all()[0], run.sequence.stored.index
    keys[:, -1] += 100
    with pytest.raises(AssertionError):
        check_summary(summary, Clustered(keys.flip(1), index.offsets, index.members))


def test_the_check_would_notice() -> None:
    run = Run()
    run.decode(PREFILL, PREFILL + 200)
    run.tokens[40], run.tokens[41] = run.tokens[41], run.tokens[40]
    with pytest.raises(AssertionError):
        run.check()


@pytest.mark.parametrize("name", ["sequence", "swarm"])
def test_forks_and_crops(name: str) -> None:
    """In the middle of rewritings, which a crop makes void."""
    run = Run(maintenance=name, selector="medoid", clusterer="swarm")
    run.decode(PREFILL, PREFILL + 150)
    other = run.fork()
    run.decode(PREFILL + 150, PREFILL + 200)
    other.decode(PREFILL + 250, PREFILL + 330)
    other.check()
    run.check()
    other.crop(20)
    other.decode(PREFILL + 330, PREFILL + 340)
    other.crop(90)  # beyond the window
    other.check()
    other.decode(PREFILL + 340, PREFILL + 400)
    third = other.fork()
    third.crop(len(third.tokens) - SINKS)
    third.decode(0, 120)
    for one in (run, other, third):
        one.check()


def test_a_crop_while_a_rewriting_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    done = counting(monkeypatch)
    run = Run()
    token = PREFILL
    while run.sequence._rewriting is None:
        run.step(token)
        token += 1
    run.crop(WINDOW + 10)
    run.decode(token, token + 100)
    run.check()
    # What was left of the prefill lost its clusters, and got others.
    assert [task.first for task in done if task.first == 0] == [0]


def test_chunks_after_decoding() -> None:
    run = Run(maintenance="swarm", clusterer="swarm", selector="medoid")
    run.decode(PREFILL, PREFILL + 100)
    part = (tensor[:, PREFILL + 100 : PREFILL + 180] for tensor in (run.k, run.v, run.q))
    run.sequence.ingest(*part)
    run.tokens += range(PREFILL + 100, PREFILL + 180)
    run.check()
    run.decode(PREFILL + 180, PREFILL + 300)
    run.check()


def test_the_same_tokens_give_the_same_layout() -> None:
    """Though threads take the time they take."""

    def layout(delay: bool) -> tuple[list[int], list[int]]:
        run = Run()
        if delay:
            release = threading.Event()
            run.store.background.submit(lambda check: release.wait(0.2))
        run.decode(PREFILL, PREFILL + 300, 1000)
        assert run.sequence.stored is not None
        index = run.sequence.stored.index
        return index.offsets.tolist(), index.members.tolist()

    assert layout(False) == layout(True)


def test_a_rewriting_that_takes_too_long_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarm_kv.sequence.PATIENCE", 0.01)
    run = Run()
    release = threading.Event()
    run.store.background.submit(lambda check: release.wait(60))
    run.decode(PREFILL, PREFILL + 150)
    assert run.sequence.stored is not None
    waiting = len(run.sequence.stored.segments)
    assert waiting > 30
    release.set()
    monkeypatch.setattr("swarm_kv.sequence.PATIENCE", 60.0)
    run.decode(PREFILL + 150, PREFILL + 200)
    run.check()
    assert len(run.sequence.stored.segments) < 16


def test_tails_of_topics_are_found_in_fewer_reads() -> None:
    """What belongs together comes to lie together, which blocks of neighbours cannot do."""

    def requests(recluster: str) -> tuple[float, int]:
        run = Run(800, recluster=recluster, layout="clusters", max_size=64)
        run.decode(PREFILL, PREFILL + 800, 1000)
        sequence = run.sequence
        index = sequence.index()
        assert index is not None
        assert sequence.stored is not None
        newer = torch.arange(PREFILL, sequence.limit - 2 * 32)
        of_topic = newer[(newer + SINKS) % TOPICS == 3]
        before = run.store.counters()["stream"]["bytes"]
        row = Wanted(sequence.stored.segments, of_topic[:0], of_topic, sequence.limit)
        with run.store.fetch([row], purpose="stream") as fetch:
            fetch.complete()
        return run.store.counters()["stream"]["bytes"] - before, len(of_topic)

    with_queries, count = requests("auto")
    without, same = requests("off")
    assert count == same
    assert with_queries < 0.7 * without


# ---- parts lie on the next drive


@pytest.mark.parametrize("placement", ["sequential", "round_robin"])
def test_parts_begin_after_the_newest_member(placement: str) -> None:
    run = Run(
        maintenance="swarm",
        clusterer="swarm",
        layout="clusters",
        selector="medoid",
        recluster="off",
        placement=placement,
        max_size=64,
    )
    seen = 0
    for token in range(PREFILL, PREFILL + 30):
        run.step(token)
    assert run.sequence.stored is not None
    stored = run.sequence.stored
    drives = torch.cat([run.store.drives_of(segment) for segment in stored.segments])
    # No loose entries here: members of the index are those of the segments, one after the other.
    assert len(drives) == stored.index.offsets[-1]
    owner, offsets = stored.index.owner.tolist(), stored.index.offsets.tolist()
    newest: dict[int, int] = {}
    for cluster, own in enumerate(owner):
        first, last = drives[offsets[cluster]], drives[offsets[cluster + 1] - 1]
        if own != cluster:
            assert first == (newest[own] + 1) % 4
            seen += 1
        newest[own] = int(last)
    assert seen > 5


# ---- codes


def test_codes_are_fitted_to_later_keys_and_queries() -> None:
    """Of another kind than those of the prefill, which the old codes cannot tell apart."""

    def error(growth: bool) -> float:
        run = Run(300)
        strength = torch.ones(DIM)
        strength[: DIM // 2] = 0.05
        run.k[:, :PREFILL] *= strength
        run.k[:, PREFILL:] *= strength.flip(0)
        run.q[:, PREFILL:] *= strength.flip(0)
        run.start()
        if not growth:
            run.sequence._recoding = None
            run.sequence._start_recoding = lambda *_: None  # type: ignore[method-assign]
        run.decode(PREFILL, PREFILL + 300, 1000)
        run.check()
        assert run.sequence.stored is not None
        index = run.sequence.stored.index
        assert (index.codebook.trained_on > PREFILL) == growth
        keys = run.sequence.read_all()[0].float()
        return float((index.decoded(torch.arange(run.sequence.limit)) - keys).square().mean())

    assert error(True) < 0.7 * error(False)


# ---- drift


def test_a_context_that_drifts_is_grouped_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    done = counting(monkeypatch)
    run = Run(900)
    run.decode(PREFILL, PREFILL + 60, 1000)
    for mass in [0.9] * 4 + [0.85] * 8:
        run.sequence.note_mass(mass)
    assert not run.sequence._drifted
    for _ in range(4):
        run.sequence.note_mass(0.6)
    assert run.sequence._drifted
    assert not run.sequence._recent.full
    run.decode(PREFILL + 60, PREFILL + 200)
    run.check()
    whole = [task for task in done if task.first == 0]
    assert len(whole) == 1
    assert whole[0].queries is not None
    assert len(whole[0].queries) == 32  # all of them after the fall
    assert not run.sequence._drifted
    run.decode(PREFILL + 200, PREFILL + 260)
    run.check()


def test_drift_is_ignored_where_it_is_off() -> None:
    run = Run(recluster="off")
    for mass in [0.9] * 4 + [0.1] * 8:
        run.sequence.note_mass(mass)
    assert not run.sequence._drifted


# ---- failures


def test_clusters_with_too_many_copies_are_merged_only(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(layout="clusters", clusterer="swarm")

    def refuse(*_: Any) -> Any:
        raise ArgumentError("clusters take 2.30 times the plain KV")

    monkeypatch.setattr(rewrite, "choose", refuse)
    run.decode(PREFILL, PREFILL + 200)
    run.check()
    assert run.store.background.failures == 0
    assert run.sequence.stored is not None
    assert len(run.sequence.stored.segments) < 16


@pytest.mark.parametrize("where", ["read", "group", "write", "charge"])
def test_a_rewriting_that_fails_changes_nothing(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    run.decode(PREFILL, PREFILL + 20, 1000)

    def fail(*_: Any, **__: Any) -> Any:
        raise StorageError("drive 1: input/output error")

    if where == "write":
        write = run.store.write

        def failing(k: Tensor, *rest: Any, **named: Any) -> Any:
            return fail() if k.shape[1] > FLUSH else write(k, *rest, **named)

        monkeypatch.setattr(run.store, "write", failing)
    else:
        target = {"read": "read_entries", "group": "choose", "charge": "IndexCharge"}[where]
        monkeypatch.setattr(rewrite, target, fail)
    with caplog.at_level(logging.WARNING):
        run.decode(PREFILL + 20, PREFILL + 250)
    run.check()
    assert run.store.background.failures > 1
    warnings = [record.message for record in caplog.records]
    assert warnings == ["swarm_kv: layer 0 keeps its layout: drive 1: input/output error"]
    assert run.sequence.stored is not None
    many = len(run.sequence.stored.segments)
    assert many > 40
    # Once it works again, it catches up.
    monkeypatch.undo()
    monkeypatch.setattr(rewrite, "MERGED", 32)
    monkeypatch.setattr(recode, "LEAST", 32)
    run.decode(PREFILL + 250, PREFILL + 350)
    run.check()
    assert len(run.sequence.stored.segments) < 20


def test_nothing_is_left_behind() -> None:
    """Of forks, of rewritings that were adopted, and of one that nobody waits for."""
    run = Run(maintenance="swarm", estimate_unfetched=True)
    store = run.store
    at_start = open_store(["/a"], engine="memory").counters()["dram"]["index"]
    run.decode(PREFILL, PREFILL + 100, 1000)
    other = run.fork()
    token = PREFILL + 100
    while run.sequence._rewriting is None:
        run.step(token)
        token += 1
    del run, other
    gc.collect()
    store.background.submit(lambda check: None).result()
    gc.collect()
    counters = store.counters()
    assert (counters["stored_bytes"], counters["dram"]["index"]) == (0, at_start)
    assert counters["dram"]["window_entries"] == 0
    store.close()


def test_closing_a_store_ends_what_is_under_way() -> None:
    run = Run()
    started, seen = threading.Event(), []

    def long(check: Callable[[], None]) -> None:
        started.set()
        while True:
            check()

    def after(check: Callable[[], None]) -> None:
        seen.append("ran")

    first, second = (run.store.background.submit(work) for work in (long, after))
    assert started.wait(60)
    run.sequence.store.close()
    assert first.done()
    assert second.done()
    assert not seen
    assert not [t for t in threading.enumerate() if t.name.startswith("swarm_kv")]


def test_work_that_nobody_wants_ends() -> None:
    background = Background()
    started, ended = threading.Event(), threading.Event()

    def long(check: Callable[[], None]) -> None:
        started.set()
        try:
            while True:
                check()
        finally:
            ended.set()

    job = background.submit(long)
    assert started.wait(60)
    assert not job.done()
    del job
    gc.collect()
    assert ended.wait(60)
    assert background.submit(lambda check: 3).result() == 3
    background.stop()


def test_room_that_background_work_pins_is_waited_for() -> None:
    """It reads what the cluster cache holds, which then cannot make room."""
    run = Run(sparsity=1.0, dram_bytes=(1 << 20) + (600 << 10))
    run.decode(PREFILL, PREFILL + 60, 1000)
    store, sequence = run.store, run.sequence
    assert sequence.stored is not None
    segments, limit = sequence.stored.segments, sequence.limit
    everything = [Wanted(segments, NOTHING, torch.arange(limit), limit)]
    with store.fetch(everything) as fetch:  # into the cache
        fetch.complete()
    held = store.counters()["dram"]
    assert held["cached_entries"] > limit // 2
    reading, go_on = threading.Event(), threading.Event()

    def pin(check: Callable[[], None]) -> None:
        with store.fetch(everything, purpose="stream"):
            reading.set()
            go_on.wait(60)

    job = store.background.submit(pin)
    assert reading.wait(60)
    free = held["limit"] - held["used"]
    with pytest.raises(CapacityError), errors.converted():
        torch.ops.swarm_kv.store_charge(store._handle, free + held["cache"] // 2)
    threading.Timer(0.1, go_on.set).start()
    store.charge(free + held["cache"] // 2)
    assert go_on.is_set()
    assert job.wait(60)
    with pytest.raises(CapacityError):  # and what never fits is refused
        store.charge(held["limit"])
    # The other way round: work waits for a step that pins.
    store.charge(-free - held["cache"] // 2)
    with store.fetch(everything) as fetch:
        fetch.complete()
    held = store.counters()["dram"]
    size = held["limit"] - held["used"] + held["cache"] // 2
    with store.fetch(everything, purpose="stream"):
        waiting = store.background.submit(lambda check: store.charge(size))
        assert not waiting.wait(0.1)
    waiting.result()


def test_no_room_for_queries_is_no_error() -> None:
    run = Run()
    held = run.store.counters()["dram"]
    run.store.charge(held["limit"] - held["used"] - 20000)
    run.decode(PREFILL, PREFILL + 40, 1000)
    run.check()
